"""A transformers causal LM whose attention reads and writes paged memory.

A step's requests are flattened to one row of tokens with their own positions;
no mask is built and no transformers cache exists: each layer writes the step's
keys and values into the pages of its group and attends over them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvell.attention.interface import AttentionKernels, GroupBatch, LayerPages
from kvell.attention.states import StateBatch
from kvell.elastic.arena import ActivationNeed
from kvell.models import hook
from kvell.models.activations import activation_model
from kvell.models.both_directions import BothDirections
from kvell.models.description import ModelDescription
from kvell.models.dropping import TokenDropping
from kvell.models.families import MIXER_KINDS, WITH_IMAGES
from kvell.models.image_batch import ImageBatch, SeenImages
from kvell.models.image_side import IMAGE_KINDS, ImageSide, text_attention
from kvell.models.image_store import ImageStore
from kvell.models.kv_memory import layer_pages, storing_layer
from kvell.models.latents import place_latents
from kvell.models.lean.decoder import LeanDecoder
from kvell.models.mixer_slots import during, place_mixers
from kvell.models.segments import LayerCallbacks
from kvell.models.state_step import StateMemory, StatePass, state_memory
from kvell.models.true_positions import TruePositions, asks_a_cache
from kvell.pages.layout import GroupKind, LayerSpec, Layout


@dataclass(frozen=True)
class ForwardBatch:
    """One step's work over a ragged batch of n requests with T new tokens in all.

    All tensors are on the model's device.

    :param token_ids: int64 [T], request after request.
    :param positions: int64 [T], each token's position in its own request.
    :param groups: metadata of each layer group, in the order of the layout; None where a
        group holds no tokens of the text.
    :param logits_rows: int64 [rows], the tokens whose logits are wanted; may be empty.
    :param images: None if no request of the step has any.
    :param prompt_ends: requests whose prompts end with this step, where layers drop tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupBatch | StateBatch | None, ...]
    logits_rows: torch.Tensor
    images: ImageBatch | None = None
    prompt_ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Memory:
    """By layer: where its keys and values lie and which group's metadata is its own."""

    pages: dict[int, LayerPages]
    groups: dict[int, int]
    states: StateMemory


class PagedModel:
    """Runs steps; knows nothing of requests beyond the rows of a batch.

    Not for concurrent use: one forward pass at a time.
    """

    def __init__(
        self,
        module: Any,
        description: ModelDescription,
        kernels: AttentionKernels,
        kv_dtype: torch.dtype | None = None,
        lean: LeanDecoder | None = None,
    ) -> None:
        """Take over a transformers causal LM (its attention implementation is set here).

        :param description: of the module's config, with the sizes of ``kv_dtype``.
        :param kv_dtype: of stored keys and values; the module's own if not given.
        :param lean: a compiled pass that has taken over the module's weights, and computes
            every step in its place.
        """
        hook.install()
        has_images = type(module).__name__ in WITH_IMAGES
        text_attention(module, has_images)
        self.module = module.eval()
        self.description = description
        self.kernels = kernels
        self.kv_dtype = kv_dtype or self.dtype
        self._mixers = place_mixers(module, description, MIXER_KINDS)
        self._latent_sizes = place_latents(module, description)
        self._asks_a_cache = asks_a_cache(module)
        self._image_side = ImageSide(module, description, kernels) if has_images else None
        self._memory: _Memory | None = None
        self.lean = lean

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self.module.device)

    @property
    def dtype(self) -> torch.dtype:
        """What the weights and activations are stored in."""
        return torch.empty(0, dtype=self.module.dtype).dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers; tied ones count once."""
        tensors = {t.data_ptr(): t.nbytes for t in self.module.state_dict().values()}
        packed_bytes = self.lean.weight_bytes if self.lean else 0
        return sum(int(size) for size in tensors.values()) + packed_bytes

    @property
    def activations(self) -> ActivationNeed:
        """What a step takes beside weights and pages: exact where a compiled pass computes it,
        else an estimate from the config."""
        return self.lean.buffers if self.lean else activation_model(self.module.config)

    @property
    def images(self) -> ImageStore | None:
        """Images of requests in flight; None if the model takes text only."""
        return self._image_side.store if self._image_side else None

    def attach(self, layout: Layout, pool: torch.Tensor) -> None:
        """Say where K and V are kept, before the first step; may be called again.

        :param pool: uint8 [≥ layout.pool_bytes] on the model's device.
        :raises ValueError: if layout, description and pool do not fit each other.
        """
        pages = layer_pages(layout, self.description, pool, self.kv_dtype, self._latent_sizes)
        groups = {
            layer.index: layout.group_of_layer(storing_layer(layer))
            for layer in self.description.layers
            if layer.index in pages and layer.kind is not GroupKind.STATE
        }
        self._memory = _Memory(
            pages,
            groups,
            state_memory(layout, self._mixers, pool, self.dtype),
        )
        if self._image_side:
            self._image_side.attach(layout, pool, pages)
        if self.lean:
            self.lean.attach(pages, groups, self._memory.states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, callbacks: LayerCallbacks | None = None) -> torch.Tensor:
        """Compute a step; returns logits, float32 [rows, vocab].

        :raises RuntimeError: if no memory is attached, or if the model's code did not
            call attention exactly once per layer, with the window the description says.
        """
        if self._memory is None:
            raise RuntimeError("attach() memory before the first forward pass")
        if self.lean is not None:
            return self._run_lean(self.lean, batch, callbacks)
        step = _PagedStep(self._memory, self.description, self.kernels, batch, callbacks)
        states = StatePass(self._memory.states, batch.groups)
        with during(self._mixers, states):
            logits = self._run(batch, step)
        step.require_complete()
        states.require_complete()
        step.dropping.move()
        return logits.float()

    @staticmethod
    def _run_lean(
        lean: LeanDecoder, batch: ForwardBatch, callbacks: LayerCallbacks | None
    ) -> torch.Tensor:
        ids, positions, rows = batch.token_ids, batch.positions, batch.logits_rows
        return lean.forward(ids, positions, rows, batch.groups, callbacks)

    def _run(self, batch: ForwardBatch, step: "_PagedStep") -> torch.Tensor:
        """transformers' own forward pass; logits [rows, vocab]."""
        if self._image_side:
            ids, positions, rows = batch.token_ids, batch.positions, batch.logits_rows
            return self._image_side.forward(ids, positions, rows, batch.images, step)
        output = self.module(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            past_key_values=TruePositions(batch.positions) if self._asks_a_cache else None,
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            **{hook.STEP_ARGUMENT: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits


_ELSEWHERE = IMAGE_KINDS | {GroupKind.STATE}
"""Layers, or parts of them, that do not come by the attention hook."""


class _PagedStep:
    """One forward pass: hands each layer its pages and its group's metadata."""

    def __init__(
        self,
        memory: _Memory,
        description: ModelDescription,
        kernels: AttentionKernels,
        batch: ForwardBatch,
        callbacks: LayerCallbacks | None,
    ) -> None:
        self._memory = memory
        self._specs = [x for x in description.layers if x.kind not in _ELSEWHERE]
        self._across = [x.index for x in description.layers if x.kind is GroupKind.CROSS]
        self._kernels = kernels
        self._groups = batch.groups
        self._images = batch.images
        self._both = BothDirections(batch.images.prefix_tokens if batch.images else ())
        self._callbacks = callbacks
        self._attended = 0
        self.dropping = TokenDropping(batch.prompt_ends)

    def attend(self, call: hook.LayerCall) -> torch.Tensor:
        """Write the new keys and values, then attend (hook.Step)."""
        spec = self._expect(call)
        pages = self._memory.pages[spec.index]
        group = self._groups[self._memory.groups[spec.index]]
        assert isinstance(group, GroupBatch)
        callbacks = self._callbacks
        params = call.params
        if spec.kind is GroupKind.CHUNKED:
            params = replace(params, chunk_tokens=spec.window_tokens)
        if spec.kv_of is None:
            value = None if call.value is None else _stored(call.value, pages)
            self._kernels.write_kv(pages, group, _stored(call.key, pages), value)
        if spec.kind is GroupKind.DROPPING:
            self.dropping.choose(spec.window_tokens, pages, group, call.query, params)
        if callbacks is None:
            return self._both.attend(self._kernels, pages, group, call.query, params)
        callbacks.after_kv_write(spec.index)
        callbacks.before_attend(spec.index, call.query)
        output = self._both.attend(self._kernels, pages, group, call.query, params)
        callbacks.after_attend(spec.index, output)
        return output

    def seen_by(self, layer: int) -> Sequence[SeenImages]:
        """Images that the step's tokens attend to in a layer (hook.Step)."""
        if not self._across or self._across.pop(0) != layer:
            raise RuntimeError(f"layer {layer} attends across, but it is not its turn")
        return self._images.seen if self._images else ()

    def require_complete(self) -> None:
        """Every layer attended, or the model has a mixer that the hook never saw."""
        if self._across:
            raise RuntimeError(f"layers {self._across} did not attend across")
        if self._attended != len(self._specs):
            raise RuntimeError(f"{self._attended} of {len(self._specs)} layers attended over pages")

    def _expect(self, call: hook.LayerCall) -> LayerSpec:
        """Layers come in order, each once, with the window that its pages are kept for.

        A chunk is no concern of transformers' attention: its mask, which we never build, knows;
        and of budgets it knows nothing.
        A module that several layers share does not know whose turn it is: the next one's.
        """
        if self._attended == len(self._specs):
            raise RuntimeError(f"layer {call.layer} attends after the last one")
        spec: LayerSpec = self._specs[self._attended]
        window_tokens = spec.window_tokens if spec.kind is GroupKind.SLIDING else 0
        in_turn = call.layer in (spec.index, hook.SHARED_MODULE)
        if not in_turn or call.params.window_tokens != window_tokens:
            raise RuntimeError(
                f"layer {call.layer} attends with window {call.params.window_tokens}, "
                f"expected layer {spec.index} with window {window_tokens}"
            )
        self._attended += 1
        return spec


def _stored(vectors: torch.Tensor, pages: LayerPages) -> torch.Tensor:
    """Keys or values as the kernels take them; they quantise by themselves."""
    return vectors if pages.quantised else vectors.to(pages.dtype)
