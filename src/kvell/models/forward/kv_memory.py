"""The KV pool for torch: flat bytes, and each layer's place in them."""

from collections.abc import Mapping
from mmap import mmap
from types import MappingProxyType

import torch

from kvell.attention.interface import LayerPages
from kvell.attention.quantised import scale_bytes_of
from kvell.models.config.description import ModelDescription
from kvell.pages.layout import GroupKind, LayerSpec, Layout

HostBuffer = memoryview | mmap | bytearray
"""Writable host memory of the pool."""


def host_pool(buffer: HostBuffer) -> torch.Tensor:
    """Return a uint8 tensor [bytes] over host memory: no copy; it keeps the buffer alive."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


def pool_tensor(buffer: HostBuffer | None, pool_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the pool as a uint8 tensor [pool_bytes] on its device.

    On the CPU it is the first ``pool_bytes`` of the given buffer; on any other device it is
    allocated there and the buffer is not used.

    :raises ValueError: on the CPU, if the buffer is missing or too small.
    """
    if device.type != "cpu":
        return torch.empty(pool_bytes, dtype=torch.uint8, device=device)
    if buffer is None or len(buffer) < pool_bytes:
        raise ValueError(f"a CPU pool of {pool_bytes} bytes needs a host buffer of that size")
    return host_pool(buffer)[:pool_bytes]


def storing_layer(layer: LayerSpec) -> int:
    """Return the layer whose pages a layer reads: itself, or the one it shares with."""
    return layer.index if layer.kv_of is None else layer.kv_of


def layer_pages(
    layout: Layout,
    description: ModelDescription,
    pool: torch.Tensor,
    dtype: torch.dtype,
    latent_sizes: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, LayerPages]:
    """Return each layer's pages of K and V, by layer, in order.

    Layers with only a state, or embeddings, are left out. Layers that share keys and values have
    the same pages.

    :param dtype: dtype of stored keys and values; its size must be the layers' element_bytes.
    :param latent_sizes: by layer that stores latents: the size of a key's part that is its value.
    :raises ValueError: if the pool is too small, a layer has no group, or sizes differ from the
        layout's.
    """
    if pool.numel() < layout.pool_bytes:
        raise ValueError(f"the pool has {pool.numel()} bytes, the layout {layout.pool_bytes}")
    attending = [layer for layer in description.layers if layer.kind not in NO_KV]
    stored = {
        layer.index: _pages_of(layout, layer, pool, dtype, latent_sizes.get(layer.index, 0))
        for layer in attending
        if layer.kv_of is None
    }
    return {layer.index: stored[storing_layer(layer)] for layer in attending}


NO_KV = frozenset({GroupKind.STATE, GroupKind.VISION})
"""Layers that store neither keys nor values."""


def _pages_of(
    layout: Layout, layer: LayerSpec, pool: torch.Tensor, dtype: torch.dtype, latent_size: int
) -> LayerPages:
    group = layout.groups[layout.group_of_layer(layer.index)]
    sizes = (dtype.itemsize, scale_bytes_of(dtype), group.layer_token_bytes)
    if sizes != (layer.element_bytes, layer.scale_bytes, layer.token_bytes):
        raise ValueError(f"layer {layer.index} does not store {dtype} as its group {group.name!r}")
    return LayerPages(
        pool=pool,
        dtype=dtype,
        page_stride_bytes=group.page_stride_bytes,
        layer_offset_bytes=group.layer_offset_bytes(layer.index),
        page_tokens=group.page_tokens,
        kv_heads=layer.kv_heads,
        head_size=layer.head_size,
        value_size=latent_size,
    )
