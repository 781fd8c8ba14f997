"""What a compiled kernel must know about its tensors before it follows their pointers.

A wrong tensor here is a mistake of the caller, not of the user: ValueError.
"""

from collections.abc import Container, Sequence

import torch

from kvell.attention.interface import GroupBatch, LayerPages

FLOATS = (torch.float32, torch.bfloat16)
"""What queries may be, and keys and values on their way into a quantised pool."""

UNIT = 8
"""Keys and values of a head are whole multiples of so many numbers: compiled kernels, and the
compiled pass, read that many at once."""


def check_layer(layer: LayerPages, dtypes: Container[torch.dtype]) -> None:
    """The pool is flat bytes on the host, its dtype known, its sizes possible."""
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
        raise ValueError(f"value_size: {layer.value_size} is no multiple of {UNIT} up to head_size")


def check_query(layer: LayerPages, query: torch.Tensor) -> None:
    """Query is [T, heads, head_size] of a float dtype, heads shared evenly."""
    _check_rows("query", layer, query, FLOATS)
    if query.shape[1] == 0 or query.shape[1] % layer.kv_heads:
        raise ValueError(f"query: {query.shape[1]} heads over {layer.kv_heads} kv heads")


def check_kv(
    layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
) -> None:
    """Key and value are [T, kv_heads, head_size]; the batch says where each token goes."""
    if (value is None) != bool(layer.value_size):
        raise ValueError("value: must be given, unless it is a part of the key")
    dtypes = FLOATS if layer.quantised else (layer.dtype,)
    stored = (("key", key),) if value is None else (("key", key), ("value", value))
    for name, tensor in stored:
        _check_rows(name, layer, tensor, dtypes)
        if tensor.shape[1] != layer.kv_heads:
            raise ValueError(f"{name}: {tensor.shape[1]} heads, the layer has {layer.kv_heads}")
    counts = {tensor.shape[0] for _, tensor in stored}
    if counts != {batch.write_page_ids.shape[0]} or counts != {batch.write_offsets.shape[0]}:
        raise ValueError(f"key: {key.shape[0]} tokens, but value or the batch have another number")


def check_sinks(sinks: torch.Tensor | None, heads: int) -> None:
    """Sinks are float32 [heads], or none."""
    if sinks is None:
        return
    if sinks.dtype != torch.float32 or sinks.shape != (heads,) or not _dense(sinks):
        raise ValueError(f"sinks: must be contiguous float32 [{heads}]")


def int32_pointer(name: str, tensor: torch.Tensor) -> int:
    """Address of a contiguous int32 tensor in host memory."""
    if tensor.dtype != torch.int32 or not _dense(tensor):
        raise ValueError(f"{name}: must be contiguous int32 in host memory")
    return tensor.data_ptr()


def _check_rows(
    name: str, layer: LayerPages, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]
) -> None:
    if tensor.dtype not in dtypes or tensor.device.type != "cpu":
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(f"{name}: must be {wanted} in host memory, is {tensor.dtype}")
    if tensor.dim() != 3 or tensor.shape[2] != layer.head_size:
        raise ValueError(f"{name}: must be [tokens, heads, {layer.head_size}]")
    if tensor.shape[0] and tensor.stride(2) != 1:
        raise ValueError(f"{name}: its last dimension must be contiguous")


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"
