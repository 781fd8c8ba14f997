"""A model's stored data, cut into pages: layer specs, groups and the layout of a pool.

Pure descriptions, derived from a model's config alone; nothing here allocates. Sources: Jenga §4.1
(two-level pages), §4.2 and fig. 7 (page first, then layer).

Byte layout of one small page of a token group::

    page ─┬─ layer 0 of the group ─┬─ K: [kv_heads][page_tokens][head_size]
          │                        └─ V: [kv_heads][page_tokens][head_size]
          ├─ layer 1 of the group …
          └─ padding (uniform stride: page_stride_bytes)

A latent (MLA) has one tensor of one head; scales of quantised elements follow their tensor. A layer
that reads another's tokens is in no group. A head's share of a layer is contiguous in K and in V.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal


class GroupKind(StrEnum):
    """Dependency rule of a layer group: which earlier tokens a later one may read."""

    FULL = "full"
    """Full attention: every earlier token."""
    SLIDING = "sliding"
    """Sliding window: the last ``window_tokens`` tokens, its own included."""
    CHUNKED = "chunked"
    """Chunked-local attention: the tokens of its own chunk of ``window_tokens``."""
    STATE = "state"
    """One state for all earlier tokens: state space, linear attention, short convolution."""
    CROSS = "cross"
    """Text attends to images: keys and values of image tokens, whole images."""
    VISION = "vision"
    """Embeddings of image tokens, from the encoder's run until prefill has consumed them."""
    DROPPING = "dropping"
    """Full attention that keeps ``window_tokens`` of the prompt's tokens once it is computed."""

    @property
    def counts_tokens(self) -> bool:
        """Whether page ``i`` holds the tokens of the text from ``i × page_tokens`` on."""
        return self not in _OTHERWISE_PAGED


IMAGE_KINDS = frozenset({GroupKind.CROSS, GroupKind.VISION})
"""The kinds whose pages hold image tokens, not tokens of the text."""
_OTHERWISE_PAGED = IMAGE_KINDS | {GroupKind.STATE}


@dataclass(frozen=True)
class LayerSpec:
    """Sizes of one layer's data for each token, or of its one state.

    ``window_tokens`` limits the tokens that a token reads. Sliding: it counts the token itself, as
    transformers does; a token at position p reads positions p-window_tokens+1 … p. Chunked: the
    chunk's length; a token reads its chunk from the multiple of window_tokens at or before p.
    Dropping: tokens of the prompt that are kept.

    :param index: of the layer in its model, from 0.
    :param kind: which earlier tokens it reads.
    :param kv_heads: vectors that a token stores in each tensor.
    :param head_size: elements of a vector.
    :param element_bytes: bytes of an element: 2 for bfloat16, 1 for fp8 and int8.
    :param window_tokens: see above; 0 for the other kinds.
    :param tensors: 2 for K and V; 1 for a latent that serves as both (MLA), or an embedding.
    :param scale_bytes: stored next to each vector of quantised elements.
    :param kv_of: index of the layer whose tokens this one reads; it stores none itself.
    :param state_bytes: size of a state layer's state; it stores nothing else.
    :param model: the layer's model, if a pool has several; "" if there is one.
    :param required_for_hit: False if the data is refilled rather than resumed.
    :param is_draft: of the draft model for ``model``: its requests hold pages of both.
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
    state_bytes: int = 0
    model: str = ""
    required_for_hit: bool = True
    is_draft: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes that one token stores in this layer, scales included; of a state layer, all."""
        if self.kv_of is not None:
            return 0
        if self.kind is GroupKind.STATE:
            return self.state_bytes
        vector_bytes = self.head_size * self.element_bytes + self.scale_bytes
        return self.tensors * self.kv_heads * vector_bytes


@dataclass(frozen=True)
class GroupSpec:
    """Layers that share kind, window and size, and the small page that holds them.

    ``page_stride_bytes × pages_per_large`` is the layout's ``large_page_bytes`` exactly, so page
    ``p`` of the pool (``slot × pages_per_large + index``) starts at byte ``p × page_stride_bytes``.

    A page of a state group holds one state (``page_tokens`` is 1) of ``layers_per_page`` layers:
    slice i of a state has layers i × layers_per_page … of ``layers``.

    :param name: like ``full`` or ``sliding(512)``.
    :param kind: which earlier tokens its layers read.
    :param layers: indices of its layers in the model.
    :param layer_token_bytes: of one layer; in a state group, the bytes of its state.
    :param page_tokens: tokens that a page holds.
    :param page_stride_bytes: from the beginning of a page to that of the next.
    :param pages_per_large: pages in a large page.
    :param window_tokens: as in :class:`LayerSpec`.
    :param layers_per_page: layers of one page; 0 for all.
    :param model: the layers' model, if a pool has several.
    :param required_for_hit: False if the data is refilled rather than resumed.
    :param is_draft: of the draft model for ``model``.
    :param counts_images: pages hold the tokens of images as well as those of the text, although
        they are not part of it (cross-attention under ``paged``).
    :param holds_embeddings: embeddings of image tokens are in this group's pages of the same tokens
        until their keys and values overwrite them, so whole images get pages together.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    layer_token_bytes: int
    page_tokens: int
    page_stride_bytes: int
    pages_per_large: int
    window_tokens: int = 0
    layers_per_page: int = 0
    model: str = ""
    required_for_hit: bool = True
    counts_images: bool = False
    holds_embeddings: bool = False
    is_draft: bool = False

    @property
    def slices(self) -> int:
        """Pages of one state."""
        return len(self.layers) // (self.layers_per_page or len(self.layers))

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one layer inside a page."""
        return self.layer_token_bytes * self.page_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of a page that hold data: the stride without its padding."""
        return self.layer_page_bytes * (self.layers_per_page or len(self.layers))

    @property
    def padding_bytes(self) -> int:
        """Unused bytes of a page; they count as waste."""
        return self.page_stride_bytes - self.page_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes one token (or one state) needs in this group, over all its layers."""
        return self.layer_token_bytes * len(self.layers)

    def layer_offset_bytes(self, layer: int) -> int:
        """Return the offset of ``layer`` (its index in the model) inside a page (its slice).

        :raises ValueError: if the layer is not in the group.
        """
        place = self.layers.index(layer) % (self.layers_per_page or len(self.layers))
        return place * self.layer_page_bytes


Association = Literal["demand", "literal"]
"""The holders that get a large page of their own: ``demand``, a holder whose known demand fills it;
``literal``, every holder in every group (Jenga §5.4 to the letter)."""


@dataclass(frozen=True)
class Layout:
    """The groups of one pool, the large page that all of them divide, and the division of the pool.

    :param groups: in the order in which the core numbers them.
    :param large_page_bytes: size of a large page.
    :param num_large_pages: large pages of the pool.
    :param sizing_rule: the rule that chose the size: ``lcm``, ``padded``, ``largest-page`` or
        ``max-page``.
    :param association: ``demand`` or ``literal``; see :data:`kvell.pages.layout.Association`.
    :param quota_large_pages: large pages that each group may take, all together no more than the
        pool has; None if every group may take any.
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

    def indices_of(self, model: str = "", *, is_draft: bool = False) -> tuple[int, ...]:
        """Return the indices of one model's groups, or of its draft model's."""
        own = (model, is_draft)
        return tuple(i for i, g in enumerate(self.groups) if (g.model, g.is_draft) == own)

    def seen_by(self, model: str = "", *, is_draft: bool = False) -> "Layout":
        """Return the same pool with the groups of one model only, or of its draft model.

        It has the positions of that model's layers, and its quota if the pool was cut.
        """
        return self._with_groups(self.indices_of(model, is_draft=is_draft))

    def held_by(self, model: str) -> "Layout":
        """Return the same pool with all groups that a model's requests hold pages of: those of the
        model and of its draft model."""
        return self._with_groups(
            tuple(index for index, group in enumerate(self.groups) if group.model == model)
        )

    def _with_groups(self, own: tuple[int, ...]) -> "Layout":
        groups = tuple(self.groups[index] for index in own)
        quota = self.quota_large_pages and tuple(self.quota_large_pages[index] for index in own)
        return replace(self, groups=groups, quota_large_pages=quota)

    def group_of_layer(self, layer: int, kind: GroupKind | None = None) -> int:
        """Return the index of the group that stores ``layer``.

        :param kind: selects a group if the layer has several (attention and a state); None prefers
            attention.
        :raises ValueError: if no group does, or groups of several models do (see :meth:`seen_by`).
        """
        holding = [i for i, group in enumerate(self.groups) if layer in group.layers]
        if len({(self.groups[i].model, self.groups[i].is_draft) for i in holding}) > 1:
            raise ValueError(f"several models of the pool have a layer {layer}")
        if kind is not None:
            holding = [i for i in holding if self.groups[i].kind is kind]
        if not holding:
            raise ValueError(f"layer {layer} belongs to no group")
        return min(holding, key=lambda i: (self.groups[i].kind is GroupKind.STATE, i))


def as_draft(layers: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Mark the layers of a draft model, to be stored together with those of its target.

    A prefix is hit only if both models' pages are there: a request resumes at the same token in
    both, and the draft model never computes tokens that the target does not compute too.
    """
    return tuple(replace(layer, is_draft=True) for layer in layers)
