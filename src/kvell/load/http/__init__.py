"""Connections of the load generator, and what it reads from a server before and after a run."""
