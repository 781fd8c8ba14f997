"""Engines, by the names of vLLM's modules."""
