"""The KV pool as torch sees it: flat bytes, and each layer's place in them."""

from mmap import mmap

import torch

from kvell.attention.interface import LayerPages
from kvell.models.description import ModelDescription
from kvell.pages.layout import LayerSpec, Layout

HostBuffer = memoryview | mmap | bytearray
"""Writable host memory of the pool."""


def host_pool(buffer: HostBuffer) -> torch.Tensor:
    """A uint8 tensor [bytes] over host memory: no copy; it keeps the buffer alive."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


def pool_tensor(buffer: HostBuffer | None, pool_bytes: int, device: torch.device) -> torch.Tensor:
    """The pool as a uint8 tensor [pool_bytes] on its device.

    On the CPU it is the first ``pool_bytes`` of the given buffer; on any other
    device it is allocated there and the buffer is not used.

    :raises ValueError: on the CPU, if the buffer is missing or too small.
    """
    if device.type != "cpu":
        return torch.empty(pool_bytes, dtype=torch.uint8, device=device)
    if buffer is None or len(buffer) < pool_bytes:
        raise ValueError(f"a CPU pool of {pool_bytes} bytes needs a host buffer of that size")
    return host_pool(buffer)[:pool_bytes]


def layer_pages(
    layout: Layout, description: ModelDescription, pool: torch.Tensor, dtype: torch.dtype
) -> tuple[LayerPages, ...]:
    """Where each layer's K and V lie, in the order of layers.

    :param dtype: of the stored keys and values; its size must be the layers' element_bytes.
    :raises ValueError: if a layer has no group, or sizes differ from the layout's.
    """
    if pool.numel() < layout.pool_bytes:
        raise ValueError(f"the pool has {pool.numel()} bytes, the layout {layout.pool_bytes}")
    return tuple(_pages_of(layout, layer, pool, dtype) for layer in description.layers)


def _pages_of(
    layout: Layout, layer: LayerSpec, pool: torch.Tensor, dtype: torch.dtype
) -> LayerPages:
    group = layout.groups[layout.group_of_layer(layer.index)]
    if dtype.itemsize != layer.element_bytes or group.layer_token_bytes != layer.token_bytes:
        raise ValueError(f"layer {layer.index} does not store {dtype} as its group {group.name!r}")
    return LayerPages(
        pool=pool,
        dtype=dtype,
        page_stride_bytes=group.page_stride_bytes,
        layer_offset_bytes=group.layer_offset_bytes(layer.index),
        page_tokens=group.page_tokens,
        kv_heads=layer.kv_heads,
        head_size=layer.head_size,
    )
