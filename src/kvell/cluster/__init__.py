"""Decisions about the instances of a cluster: routing, steering, and shares of a host."""
