"""Keys and values in eight bits: each vector is stored with the scale it was divided by.

A stored row is ``head_size`` elements followed by one float32, so a token's vector and
its scale travel together and a head's share of a page stays one run of bytes.
"""

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The quantised dtypes, and the largest number each can hold."""

SCALE_BYTES = 4
"""Of the float32 behind each quantised vector."""


def is_quantised(dtype: torch.dtype) -> bool:
    """Return whether vectors of this dtype are stored with a scale."""
    return dtype in LARGEST


def scale_bytes_of(dtype: torch.dtype) -> int:
    """Bytes stored beside each vector of the dtype; 0 for plain numbers."""
    return SCALE_BYTES if is_quantised(dtype) else 0


def quantise(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows as they are stored: [..., size] of any float dtype → uint8 [..., size + 4].

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
    """The numbers that stored rows stand for: uint8 [..., size + 4] → float32 [..., size]."""
    elements = rows[..., :-SCALE_BYTES].contiguous().view(dtype)
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return elements.float() * scale
