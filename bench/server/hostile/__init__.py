"""Hostile clients beside a well-behaved tenant, against one server."""
