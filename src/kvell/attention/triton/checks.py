"""Checks of a layer's pool; a wrong one is a mistake of the caller.

Page ids are not checked: the host would have to wait for the device.
"""

import torch

from kvell.attention.interface import LayerPages
from kvell.attention.quantised import SCALE_BYTES

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of queries, and of keys and values before they are quantised."""

STORED = (*FLOATS, torch.int8, torch.float8_e4m3fn)
"""The dtypes of a pool."""


def check_layer(layer: LayerPages) -> None:
    """Check that the pool is flat bytes, the dtype supported, and the offsets aligned.

    :raises ValueError: naming the wrong field.
    """
    pool = layer.pool
    if pool.dtype != torch.uint8 or pool.dim() != 1 or not pool.is_contiguous():
        raise ValueError("pool: must be a flat uint8 tensor")
    if layer.dtype not in STORED:
        raise ValueError(f"dtype: {layer.dtype} is not supported")
    if min(layer.page_stride_bytes, layer.page_tokens, layer.kv_heads, layer.head_size) <= 0:
        raise ValueError(
            "layer: page_stride_bytes, page_tokens, kv_heads and head_size must be positive"
        )
    if not 0 <= layer.value_size <= layer.head_size:
        raise ValueError(f"value_size: {layer.value_size} is not a length up to head_size")
    unit = SCALE_BYTES if layer.quantised else layer.dtype.itemsize
    places = (layer.page_stride_bytes, layer.layer_offset_bytes, layer.row_bytes)
    if any(place % unit for place in (*places, pool.data_ptr())):
        raise ValueError(f"layer: strides and offsets {places} are not multiples of {unit} bytes")
