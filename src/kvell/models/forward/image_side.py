"""The image side of a model: encoder, pages of images, and the text's decoder.

images ─ encoder ─► embeddings ─► pages ─ the step that computes the token ─► decoder
                └─► keys and values of cross-attention layers ─► pages ─► decoder

Keys and values of cross-attention layers are computed once, when the image is first needed, and
stored in pages; queries are from the text. A token attends to all tokens of the images it sees and
to no others. A token that sees no image gets nothing from such a layer, nor from the layer's MLP.

Embeddings of image tokens have pages of their own, or use the place of their keys and values:

    pages of their own     [page_tokens][hidden]
    in keys' and values'   row r of every vector block is token r's: an embedding is cut into
                           pieces of one row's length, one for each block in order

    page ─┬─ block 0 [page_tokens][row] ── row r: piece 0 of token r's embedding
          ├─ block 1 [page_tokens][row] ── row r: piece 1
          └─ …

So a chunk that writes keys and values of some tokens of a page leaves the embeddings of the others
unchanged (Jenga §6.2, fig. 12b).
"""

from collections.abc import Mapping, Sequence
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
from kvell.models.config.description import ModelDescription
from kvell.models.families.families import CROSS_MODULES, WITH_IMAGES
from kvell.models.forward import hook
from kvell.models.forward.hook import STEP_ARGUMENT
from kvell.models.images.image_batch import ImageBatch, PageRows, SeenImages
from kvell.models.images.image_families import FAMILIES
from kvell.models.images.image_store import ImageStore
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout


class EmbeddingPages:
    """A view of the pool, [pages, blocks, page_tokens, row bytes]."""

    def __init__(
        self, group: GroupSpec, layers: tuple[LayerSpec, ...], pool: torch.Tensor, size: int
    ) -> None:
        first = layers[0]
        vectors = 1 if group.kind is GroupKind.VISION else first.tensors * first.kv_heads
        blocks = vectors * len(group.layers)
        row_bytes = group.layer_token_bytes // vectors
        pages = pool.numel() // group.page_stride_bytes
        whole = pool[: pages * group.page_stride_bytes].view(pages, -1)[:, : group.page_bytes]
        self._size = size
        self._view: torch.Tensor = whole.view(pages, blocks, group.page_tokens, row_bytes)

    def store(self, rows: PageRows, embeddings: torch.Tensor) -> None:
        """Write embeddings, [n, size] of any float dtype.

        :raises ValueError: if an embedding is longer than a token's rows in the page.
        """
        raw = embeddings.contiguous().view(torch.uint8)
        blocks = self._blocks(raw.shape[1])
        padded = raw.new_zeros(len(raw), blocks * self._view.shape[3])
        padded[:, : raw.shape[1]] = raw
        pieces = padded.view(len(raw), blocks, -1)
        self._view[:, :blocks].transpose(1, 2)[rows.page_ids, rows.offsets] = pieces

    def load(self, rows: PageRows, dtype: torch.dtype) -> torch.Tensor:
        raw_bytes = self._size * dtype.itemsize
        blocks = self._blocks(raw_bytes)
        pieces = self._view[:, :blocks].transpose(1, 2)[rows.page_ids, rows.offsets]
        return pieces.flatten(1)[:, :raw_bytes].contiguous().view(dtype)

    def _blocks(self, raw_bytes: int) -> int:
        blocks = -(-raw_bytes // self._view.shape[3])
        if blocks > self._view.shape[1]:
            raise ValueError(f"a token of {raw_bytes} bytes does not fit in its row of the page")
        return blocks


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


class ImageSide:
    """Our part of a transformers model of images and text.

    :ivar store: images of requests in flight; counts encoder runs.
    """

    def __init__(
        self, module: Any, description: ModelDescription, kernels: AttentionKernels
    ) -> None:
        self.store = ImageStore(FAMILIES[WITH_IMAGES[type(module).__name__]](module))
        self._decoder = module.model.language_model
        self._head = module.lm_head
        self._layers = description.layers
        across = frozenset(x.index for x in description.layers if x.kind is GroupKind.CROSS)
        self._cross = place_cross(module, across, CROSS_MODULES if across else frozenset(), kernels)
        self._embeddings: EmbeddingPages | None = None

    def attach(self, layout: Layout, pool: torch.Tensor, pages: Mapping[int, LayerPages]) -> None:
        """Set the memory for embeddings, keys and values of images.

        :raises ChangeSomething: if the layout keeps image tokens among text tokens.
        """
        if any(group.counts_images for group in layout.groups):
            raise ChangeSomething(
                "--manager",
                "paged",
                "keeps tokens of images among those of the text, where no layer can read them",
                "use kvell",
            )
        for slot in self._cross:
            slot.pages = pages[slot.layer]
        hosts = [g for g in layout.groups if g.holds_embeddings or g.kind is GroupKind.VISION]
        for group in hosts:
            own = tuple(layer for layer in self._layers if layer.index in group.layers)
            size = int(self._decoder.config.hidden_size)
            self._embeddings = EmbeddingPages(group, own, pool, size)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor,
        images: ImageBatch | None,
        step: hook.PagedStep,
    ) -> torch.Tensor:
        """Compute a step; parameters as in ``ForwardBatch``. Return logits [rows, vocab]."""
        inputs = self._inputs(token_ids, images)
        output = self._decoder(
            inputs_embeds=inputs.unsqueeze(0),
            position_ids=self._positions(positions, images),
            use_cache=False,
            **self._across(inputs, images),
            **{hook.STEP_ARGUMENT: step},
        )
        logits: torch.Tensor = self._head(output.last_hidden_state[0, logits_rows])
        return logits

    def _positions(self, positions: torch.Tensor, images: ImageBatch | None) -> torch.Tensor:
        """Return positions in the decoder's form: [1, T], or [3, 1, T] if images are grids."""
        if images is not None and images.positions is not None:
            return images.positions.unsqueeze(1)
        return positions.unsqueeze(0) + self.store.family.first_position

    def _inputs(self, token_ids: torch.Tensor, images: ImageBatch | None) -> torch.Tensor:
        """Return the step's embeddings, [T, hidden]; encode and store new images first."""
        made: dict[bytes, torch.Tensor] = {}
        for span, rows in images.begun if images is not None else ():
            if span.images_digest not in made:
                made[span.images_digest] = self.store.encode(span)
            self._keep(made[span.images_digest], rows)
        lookup = self._decoder.get_input_embeddings()
        if images is None or self._embeddings is None or not len(images.rows):
            embedded: torch.Tensor = lookup(token_ids)
        else:  # a placeholder's id may be outside of the text's vocabulary
            embedded = lookup(token_ids.index_fill(0, images.rows, 0))
            embedded[images.rows] = self._embeddings.load(images.embeddings, embedded.dtype)
        return embedded

    def _keep(self, encoded: torch.Tensor, rows: PageRows) -> None:
        if self._embeddings is not None:
            self._embeddings.store(rows, encoded)
        for slot in self._cross:
            slot.write(encoded, rows)

    def _across(self, inputs: torch.Tensor, images: ImageBatch | None) -> dict[str, Any]:
        """Return arguments of cross-attention layers: states, without which they do not run, and a
        mask of the tokens that see an image."""
        if not self._cross:
            return {}
        seen = images.seen if images is not None else ()
        return {
            "cross_attention_states": inputs,
            "full_text_row_masked_out_mask": seen_mask(seen, len(inputs), inputs),
        }


def text_attention(module: Any, has_images: bool) -> None:
    """Route attention of the text's layers to the hook; encoders keep transformers' own."""
    if has_images:
        module.set_attn_implementation({"text_config": hook.HOOK_NAME})
    else:
        module.set_attn_implementation(hook.HOOK_NAME)
