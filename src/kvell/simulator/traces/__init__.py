"""Traces: files, generators, and the prompts that rows stand for."""
