"""Layers and batches that the contract is checked on: the tests' own, and larger ones."""

from dataclasses import replace

from tests.attention.cases import Shape

RAGGED = ((1, 1), (37, 37), (200, 1), (130, 7), (64, 64), (65, 2), (600, 20))

SHAPES = {
    "grouped heads": Shape(RAGGED),
    "one kv head, wide": Shape(RAGGED, heads=4, kv_heads=1, head_size=256),
    "a kv head each": Shape(RAGGED, heads=4, kv_heads=4, head_size=128),
    "groups of four": Shape(RAGGED, heads=16, kv_heads=4, head_size=128),
    "groups of seven": Shape(RAGGED, heads=14, kv_heads=2, head_size=128),
    "pages of 8": Shape(RAGGED, page_tokens=8),
    "pages of 24": Shape(RAGGED, page_tokens=24),
    "pages larger than a span": Shape(RAGGED, page_tokens=128),
    "head size 80": Shape(RAGGED, heads=4, kv_heads=2, head_size=80),
    "head size 8": Shape(RAGGED, heads=3, kv_heads=1, head_size=8),
    "head size 72": Shape(RAGGED, heads=10, kv_heads=2, head_size=72),
    "many heads to one": Shape(RAGGED, heads=16, kv_heads=1, head_size=32),
    "more heads than a tile": Shape(RAGGED, heads=130, kv_heads=1, head_size=32),
    "window": Shape(RAGGED, window_tokens=40),
    "window inside a page": Shape(RAGGED, window_tokens=5),
    "window of one token": Shape(RAGGED, window_tokens=1),
    "window over a long context": Shape(((1500, 3), (700, 100)), window_tokens=520),
    "softcap": Shape(RAGGED, softcap=3.0),
    "loose softcap": Shape(RAGGED, softcap=50.0),
    "sinks": Shape(RAGGED, sinks=True),
    "all at once": Shape(RAGGED, window_tokens=33, softcap=5.0, sinks=True, page_tokens=8),
    "chunks": Shape(RAGGED, chunk_tokens=24),
    "chunks over a long context": Shape(((1500, 3), (700, 100)), chunk_tokens=520),
    "chunks and a window": Shape(RAGGED, chunk_tokens=50, window_tokens=20),
    "latents": Shape(RAGGED, heads=6, kv_heads=1, head_size=72, value_size=64),
    "large latents": Shape(((300, 1), (200, 30)), 16, 1, 576, value_size=512),
    "small latents": Shape(RAGGED, heads=20, kv_heads=1, head_size=24, value_size=8),
    "latents of several heads": Shape(RAGGED, heads=4, kv_heads=2, head_size=40, value_size=16),
    "no rest behind a latent": Shape(RAGGED, heads=4, kv_heads=1, head_size=64, value_size=64),
    "several sections": Shape(((5000, 1), (1025, 1), (1024, 1), (600, 200)), heads=2, kv_heads=1),
    "a request without new tokens": Shape(((20, 3), (30, 0), (40, 2))),
}
QUANTISED = {
    "grouped heads": Shape(RAGGED),
    "head size 72, pages of 8": Shape(RAGGED, heads=2, kv_heads=2, head_size=72, page_tokens=8),
    "window, cap and sinks": Shape(RAGGED, window_tokens=40, softcap=3.0, sinks=True),
    "latents": Shape(RAGGED, heads=6, kv_heads=1, head_size=72, value_size=64),
}
SMALL = ((1, 1), (25, 25), (40, 1), (20, 5))
FEW = ("all at once", "latents")
"""Names of the shapes that a CPU checks where it pretends to be a GPU."""


def tiny(shape: Shape) -> Shape:
    """Return the shape with short requests and small heads, for the interpreter."""
    is_latent = bool(shape.value_size)
    requests = SMALL if shape.requests == RAGGED else shape.requests
    size = 24 if is_latent else 16
    return replace(shape, requests=requests, head_size=size, value_size=16 if is_latent else 0)
