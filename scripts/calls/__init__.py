"""Calls of Kvell's own functions by a plain chat request: ``python -m scripts.calls``."""
