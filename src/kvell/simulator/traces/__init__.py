"""Traces: files, generators, and the prompts of their rows."""
