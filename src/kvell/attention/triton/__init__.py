"""Attention over pages on a GPU, written in Triton."""
