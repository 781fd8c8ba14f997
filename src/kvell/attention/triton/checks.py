"""Checks of the kernels' tensors; a wrong tensor is a mistake of the caller.

Page ids are not checked: the host would have to wait for the device.
"""

import torch

from kvell.attention.interface import GroupBatch, LayerPages
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


def check_query(layer: LayerPages, query: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Check that query is [T, heads, head_size], heads a multiple of kv_heads, and sinks [heads].

    :raises ValueError: naming the wrong tensor.
    """
    _check_rows("query", layer, query, FLOATS)
    heads = query.shape[1]
    if heads == 0 or heads % layer.kv_heads:
        raise ValueError(f"query: {heads} heads over {layer.kv_heads} kv heads")
    if sinks is None:
        return
    wanted = (torch.float32, (heads,), query.device)
    if (sinks.dtype, sinks.shape, sinks.device) != wanted or not sinks.is_contiguous():
        raise ValueError(f"sinks: must be contiguous float32 [{heads}] on {query.device}")


def check_kv(
    layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
) -> None:
    """Check that key and value are [T, kv_heads, head_size], and that the batch places T tokens.

    :raises ValueError: naming the wrong tensor.
    """
    if (value is None) != bool(layer.value_size):
        raise ValueError("value: must be given, unless it is a part of the key")
    dtypes = FLOATS if layer.quantised else (layer.dtype,)
    stored = (("key", key),) if value is None else (("key", key), ("value", value))
    for name, tensor in stored:
        _check_rows(name, layer, tensor, dtypes)
        if tensor.shape[1] != layer.kv_heads:
            raise ValueError(f"{name}: {tensor.shape[1]} heads, the layer has {layer.kv_heads}")
    counts = {tensor.shape[0] for _, tensor in stored}
    if counts != {len(batch.write_page_ids)} or counts != {len(batch.write_offsets)}:
        raise ValueError(f"key: {key.shape[0]} tokens, but value or the batch have another number")


def _check_rows(
    name: str, layer: LayerPages, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.dtype not in dtypes or tensor.device != layer.pool.device:
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(f"{name}: must be {wanted} on {layer.pool.device}, is {tensor.dtype}")
    if tensor.dim() != 3 or tensor.shape[2] != layer.head_size:
        raise ValueError(f"{name}: must be [tokens, heads, {layer.head_size}]")
    if tensor.shape[0] and tensor.stride(2) != 1:
        raise ValueError(f"{name}: its last dimension must be contiguous")
