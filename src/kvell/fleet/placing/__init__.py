"""Instances on machines of a cluster: placed, started, found, and connected to their front."""
