"""Instances and who keeps them: a front, or the manager of a cluster."""
