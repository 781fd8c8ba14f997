"""Resolves ``--model`` to a local directory."""
