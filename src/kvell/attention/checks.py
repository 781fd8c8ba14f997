"""Checks of tensors before a compiled kernel follows their pointers.

A wrong tensor is a mistake of the caller, not of the user, so all checks raise ValueError.
"""

from collections.abc import Container, Sequence

import torch

from kvell.attention.interface import GroupBatch, LayerPages

FLOATS = (torch.float32, torch.bfloat16)
"""The dtypes of queries, and of keys and values before they are quantised."""

UNIT = 8
"""The length of a head's key or value is a multiple of this: compiled code reads 8 numbers
together."""


def check_layer(layer: LayerPages, dtypes: Container[torch.dtype]) -> None:
    """Check that the pool is flat bytes in host memory, and that dtype and sizes are supported."""
    pool = layer.pool
    if pool.dtype != torch.uint8 or pool.dim() != 1 or not _dense(pool):
        raise ValueError("pool: must be a flat uint8 tensor in host memory")
    if layer.dtype not in dtypes:
        raise ValueError(f"dtype: {layer.dtype} is not supported")
    if layer.head_size <= 0 or layer.head_size % UNIT:
        raise ValueError(f"head_size: {layer.head_size} is not a multiple of {UNIT}")
    if min(layer.page_stride_bytes, layer.page_tokens, layer.kv_heads) <= 0:
        raise ValueError("layer: page_stride_bytes, page_tokens and kv_heads must be positive")
    if not 0 <= layer.value_size <= layer.head_size or layer.value_size % UNIT:
        raise ValueError(
            f"value_size: {layer.value_size} is not a multiple of {UNIT} up to head_size"
        )


def check_query(
    layer: LayerPages,
    query: torch.Tensor,
    sinks: torch.Tensor | None = None,
    floats: Sequence[torch.dtype] = FLOATS,
) -> None:
    """Check that query is [T, heads, head_size], heads a multiple of kv_heads, and sinks [heads].

    :param floats: the dtypes of queries that the kernels read.
    """
    _check_rows("query", layer, query, floats)
    heads = query.shape[1]
    if heads == 0 or heads % layer.kv_heads:
        raise ValueError(f"query: {heads} heads over {layer.kv_heads} kv heads")
    if sinks is None:
        return
    wanted = (torch.float32, (heads,), query.device)
    if (sinks.dtype, sinks.shape, sinks.device) != wanted or not sinks.is_contiguous():
        raise ValueError(f"sinks: must be contiguous float32 [{heads}] on {query.device}")


def check_kv(
    layer: LayerPages,
    batch: GroupBatch,
    key: torch.Tensor,
    value: torch.Tensor | None,
    floats: Sequence[torch.dtype] = FLOATS,
) -> None:
    """Check that key and value are [T, kv_heads, head_size], and that the batch places T tokens."""
    if (value is None) != bool(layer.value_size):
        raise ValueError("value: must be given, unless it is a part of the key")
    dtypes = floats if layer.quantised else (layer.dtype,)
    stored = (("key", key),) if value is None else (("key", key), ("value", value))
    for name, tensor in stored:
        _check_rows(name, layer, tensor, dtypes)
        if tensor.shape[1] != layer.kv_heads:
            raise ValueError(f"{name}: {tensor.shape[1]} heads, the layer has {layer.kv_heads}")
    counts = {tensor.shape[0] for _, tensor in stored}
    if counts != {batch.write_page_ids.shape[0]} or counts != {batch.write_offsets.shape[0]}:
        raise ValueError(f"key: {key.shape[0]} tokens, but value or the batch have another number")


def int32_pointer(name: str, tensor: torch.Tensor) -> int:
    if tensor.dtype != torch.int32 or not _dense(tensor):
        raise ValueError(f"{name}: must be contiguous int32 in host memory")
    return tensor.data_ptr()


def _check_rows(
    name: str, layer: LayerPages, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]
) -> None:
    if tensor.dtype not in dtypes or tensor.device != layer.pool.device:
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(f"{name}: must be {wanted} on {layer.pool.device}, is {tensor.dtype}")
    if tensor.dim() != 3 or tensor.shape[2] != layer.head_size:
        raise ValueError(f"{name}: must be [tokens, heads, {layer.head_size}]")
    if tensor.shape[0] and tensor.stride(2) != 1:
        raise ValueError(f"{name}: its last dimension must be contiguous")


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"
