"""Figures of engines, by the names of vLLM's modules."""
