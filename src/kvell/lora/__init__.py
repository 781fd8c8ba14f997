"""Adapters, by the names of vLLM's modules: none is served."""
