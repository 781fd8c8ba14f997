"""Cross-attention layers, which attend to images.

Keys and values are computed once, when the image is first needed, and stored in pages; queries are
from the text. A token attends to all tokens of the images it sees and to no others. A token that
sees no image gets nothing from such a layer, nor from the layer's MLP.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvell.attention.interface import (
    AttendParams,
    AttentionKernels,
    GroupBatch,
    LayerPages,
    Partial,
)
from kvell.attention.merge import merge
from kvell.errors import ChangeSomething
from kvell.models.forward.hook import STEP_ARGUMENT
from kvell.models.images.image_batch import PageRows, SeenImages


class CrossSlot:
    """Replacement of the forward pass of one cross-attention module of transformers."""

    def __init__(self, module: Any, kernels: AttentionKernels) -> None:
        self.layer = int(module.layer_idx)
        self.pages: LayerPages | None = None
        self._module = module
        self._kernels = kernels

    def __call__(
        self, hidden_states: torch.Tensor, *_: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        """Map [1, T, hidden] → the same, and no weights, with transformers' signature."""
        seen: Sequence[SeenImages] = named[STEP_ARGUMENT].seen_by(self.layer)
        module = self._module
        query = module.q_norm(_heads(module.q_proj(hidden_states[0]), module.head_dim))
        output = module.o_proj(self._attend(query, seen).flatten(1).to(hidden_states.dtype))
        return output.unsqueeze(0), None

    def write(self, states: torch.Tensor, rows: PageRows) -> None:
        """Store keys and values of an image's tokens, given as [n, hidden]."""
        assert self.pages is not None
        module, dtype = self._module, self.pages.dtype
        key = module.k_norm(_heads(module.k_proj(states), module.head_dim))
        value = _heads(module.v_proj(states), module.head_dim)
        if not self.pages.quantised:
            key, value = key.to(dtype), value.to(dtype)
        self._kernels.write_kv(self.pages, _writing(rows), key, value)

    def _attend(self, query: torch.Tensor, seen: Sequence[SeenImages]) -> torch.Tensor:
        """Attend to all images seen: [T, heads, size]; zero for a token that sees none."""
        assert self.pages is not None
        params = AttendParams(scale=self._module.scaling)
        output = torch.zeros_like(query)
        if len(seen) == 1:
            rows = seen[0].rows
            output[rows] = self._kernels.attend(self.pages, seen[0].batch, query[rows], params)
        elif seen:
            parts = [
                _spread(
                    self._kernels.attend_partial(self.pages, s.batch, query[s.rows], params),
                    s,
                    query,
                )
                for s in seen
            ]
            output = merge(parts)
        return output


def place_cross(
    module: Any, layers: frozenset[int], names: frozenset[str], kernels: AttentionKernels
) -> tuple[CrossSlot, ...]:
    """Replace the forward pass of every cross-attention module of the given class names.

    Only these instances are changed, not their class.

    :param layers: the cross-attention layers.
    :raises ChangeSomething: if one of them has no such module.
    """
    slots = []
    for child in module.modules():
        if type(child).__name__ in names:
            slot = CrossSlot(child, kernels)
            child.forward = slot
            slots.append(slot)
    if missing := sorted(layers ^ {slot.layer for slot in slots}):
        raise ChangeSomething(
            "model",
            type(module).__name__,
            f"has cross-attention in layers {missing} without a known module",
            "use a model whose layers are all known to be exact",
        )
    return tuple(slots)


def seen_mask(seen: Sequence[SeenImages], tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Return 1 for tokens that see an image, 0 for others; [1, 1, tokens, 1], dtype of ``like``."""
    mask = like.new_zeros(tokens)
    for image in seen:
        mask[image.rows] = 1
    return mask.view(1, 1, tokens, 1)


def _heads(states: torch.Tensor, size: int) -> torch.Tensor:
    return states.view(len(states), -1, size)


def _spread(part: Partial, seen: SeenImages, query: torch.Tensor) -> Partial:
    """Expand to all rows of the step; rows that do not see the image are empty."""
    heads = query.shape[:2]
    output = part.output.new_zeros(*heads, part.output.shape[2])
    maximum = part.maximum.new_full(heads, -torch.inf)
    denominator = part.denominator.new_zeros(heads)
    output[seen.rows] = part.output
    maximum[seen.rows] = part.maximum
    denominator[seen.rows] = part.denominator
    return Partial(output, maximum, denominator)


def _writing(rows: PageRows) -> GroupBatch:
    none = rows.page_ids.new_zeros(1, dtype=torch.int32)
    return GroupBatch(
        query_starts=none,
        context_lens=none[:0],
        table_starts=none,
        page_ids=none[:0],
        first_positions=none[:0],
        write_page_ids=rows.page_ids.int(),
        write_offsets=rows.offsets.int(),
    )
