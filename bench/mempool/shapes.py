"""Models whose pages are moved, and the pools that they are in."""

from kvell.vocabulary import GIB

SHAPES = ("llama3-8b", "gemma3-27b", "falcon-h1-7b")
POOL_BYTES = 3 * GIB
MOVED_POOL_BYTES = GIB * 3 // 2
"""Of each process between which texts move."""
