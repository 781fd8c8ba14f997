"""Anthropic's request bodies, and their translation to chat requests."""
