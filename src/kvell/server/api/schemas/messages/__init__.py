"""Anthropic's request bodies, as chat requests."""
