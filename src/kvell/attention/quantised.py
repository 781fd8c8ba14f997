"""Keys and values in eight bits: each vector is stored with its scale.

A stored row is ``head_size`` elements followed by one float32 scale, so both are copied
together, and a head's share of a page stays contiguous.
"""

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each quantised dtype."""

SCALE_BYTES = 4
"""The size of the float32 scale after each quantised vector."""


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype in LARGEST


def scale_bytes_of(dtype: torch.dtype) -> int:
    """Return the bytes of a vector's scale: 0 if the dtype is not quantised."""
    return SCALE_BYTES if is_quantised(dtype) else 0


def quantise(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantise vectors into stored rows: [..., size] of any float dtype → uint8 [..., size + 4].

    The largest number of each vector becomes the largest of the dtype; a vector of zeros
    has scale 0.
    """
    exact = vectors.float()
    scale = exact.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    steps = exact / torch.where(scale == 0, 1.0, scale)
    if not dtype.is_floating_point:
        steps = steps.round()
    elements = steps.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return torch.cat([elements.view(torch.uint8), scale.view(torch.uint8)], -1)


def dequantise(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of stored rows: uint8 [..., size + 4] → float32 [..., size]."""
    elements = rows[..., :-SCALE_BYTES].contiguous().view(dtype)
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return elements.float() * scale
