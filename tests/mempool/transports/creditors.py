"""Creditors whose pages are read."""

PATIENCE_SECONDS = 30.0
