"""Processes of an instance that compile grammars and compute masks."""
