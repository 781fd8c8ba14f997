"""The image side of a model: encoder, pages of images, and the text's decoder.

images ─ encoder ─► embeddings ─► pages ─ the step that computes the token ─► decoder
                └─► keys and values of cross-attention layers ─► pages ─► decoder
"""

from collections.abc import Mapping
from typing import Any

import torch

from kvell.attention.interface import AttentionKernels, LayerPages
from kvell.errors import ChangeSomething
from kvell.models.config.description import ModelDescription
from kvell.models.families.families import CROSS_MODULES, WITH_IMAGES
from kvell.models.forward import hook
from kvell.models.forward.cross_attention import place_cross, seen_mask
from kvell.models.images.embedding_pages import EmbeddingPages
from kvell.models.images.image_batch import ImageBatch, PageRows
from kvell.models.images.image_families import FAMILIES
from kvell.models.images.image_store import ImageStore
from kvell.pages.layout import GroupKind, Layout


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

    @property
    def cross_layers(self) -> int:
        return len(self._cross)

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
        step: hook.Step,
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
        """Store embeddings until their tokens are computed, keys and values for the request."""
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
