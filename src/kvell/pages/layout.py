"""What a model stores, cut into pages: layer specs, groups and the layout of a pool.

Pure descriptions, derived from a model's config alone; nothing here allocates.
Sources: Jenga §4.1 (two-level pages), §4.2 and fig. 7 (page first, then layer).

Byte layout of one small page of a token group::

    page ─┬─ layer 0 of the group ─┬─ K: [kv_heads][page_tokens][head_size]
          │                        └─ V: [kv_heads][page_tokens][head_size]
          ├─ layer 1 of the group …
          └─ padding (uniform stride: page_stride_bytes)

A latent (MLA) has one tensor of one head; scales of quantised elements follow their
tensor.  A layer that reads another's tokens is in no group.  A head's share of a
layer is contiguous in K and in V.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class GroupKind(StrEnum):
    """Dependency rule of a layer group: which earlier tokens a later one may read."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer stores for each token: sizes, whether it can be run or not.

    ``window_tokens`` says how far a token reads.  Sliding: it counts the token itself,
    as transformers does; a token at position p reads positions p-window_tokens+1 … p.
    Chunked: the chunk's length; a token reads its chunk from the multiple of
    window_tokens at or before p.  Zero for full attention.

    :param kv_heads: vectors that a token stores in each tensor.
    :param tensors: 2 for K and V; 1 for a latent that serves as both (MLA).
    :param scale_bytes: stored beside each vector of quantised elements.
    :param kv_of: index of the layer whose tokens this one reads; it stores none itself.
    """

    index: int
    kind: GroupKind
    kv_heads: int
    head_size: int
    element_bytes: int
    window_tokens: int = 0
    tensors: int = 2
    scale_bytes: int = 0
    kv_of: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes that one token stores in this layer, scales included."""
        if self.kv_of is not None:
            return 0
        vector_bytes = self.head_size * self.element_bytes + self.scale_bytes
        return self.tensors * self.kv_heads * vector_bytes


@dataclass(frozen=True)
class GroupSpec:
    """Layers that share kind, window and size, and the small page that holds them.

    ``page_stride_bytes × pages_per_large`` is the layout's ``large_page_bytes``
    exactly, so page ``p`` of the pool (``slot × pages_per_large + index``) starts
    at byte ``p × page_stride_bytes``.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    layer_token_bytes: int
    page_tokens: int
    page_stride_bytes: int
    pages_per_large: int
    window_tokens: int = 0

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one layer inside a page."""
        return self.layer_token_bytes * self.page_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of a page that hold data: the stride without its padding."""
        return self.layer_page_bytes * len(self.layers)

    @property
    def padding_bytes(self) -> int:
        """Bytes of a page that hold nothing; they count as waste."""
        return self.page_stride_bytes - self.page_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes one token needs in this group, over all its layers."""
        return self.layer_token_bytes * len(self.layers)

    def layer_offset_bytes(self, layer: int) -> int:
        """Where ``layer`` (its index in the model) starts inside a page of this group.

        :raises ValueError: if the layer is not in the group.
        """
        return self.layers.index(layer) * self.layer_page_bytes


Association = Literal["demand", "literal"]
"""Who gets a large page of its own: ``demand``, a holder whose known demand fills it;
``literal``, every holder in every group (Jenga §5.4 to the letter)."""


@dataclass(frozen=True)
class Layout:
    """The groups of one pool, the large page that all of them divide, and how it is shared out.

    :param quota_large_pages: large pages that each group may take, all together no more
        than the pool has; None if every group may take any.
    """

    groups: tuple[GroupSpec, ...]
    large_page_bytes: int
    num_large_pages: int
    sizing_rule: str = ""
    association: Association = "demand"
    quota_large_pages: tuple[int, ...] | None = None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.large_page_bytes * self.num_large_pages

    def group_of_layer(self, layer: int) -> int:
        """Index of the group that stores ``layer``.

        :raises ValueError: if no group does.
        """
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index
        raise ValueError(f"layer {layer} belongs to no group")
