"""Traces: files, generators, and the prompts that they stand for."""
