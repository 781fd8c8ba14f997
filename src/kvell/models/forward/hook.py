"""The attention function that transformers' modelling code calls instead of its own, and its step.

The function holds no state: the step arrives as a keyword argument of the
forward pass and carries pages, kernels and callbacks.  So two models, or two
threads, share no global.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from kvell.attention.interface import AttendParams, AttentionKernels, GroupBatch, LayerPages
from kvell.models.config.description import ModelDescription
from kvell.models.forward.both_directions import BothDirections
from kvell.models.forward.dropping import TokenDropping
from kvell.models.forward.forward_batch import ForwardBatch, ModelMemory
from kvell.models.forward.latents import latents_of
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.images.image_batch import SeenImages
from kvell.models.partials.remote_sections import LayerQueries
from kvell.pages.layout import IMAGE_KINDS, GroupKind, LayerSpec

HOOK_NAME = "kvell_paged"
"""Name of the attention implementation that models are set to."""

STEP_ARGUMENT = "kvell_step"
"""Keyword argument of the forward pass that carries the step."""


SHARED_MODULE = -1
"""Layer index given by a module that several layers share."""


@dataclass(frozen=True)
class LayerCall:
    """A layer's attention parameters and its new tokens of this step.

    Tensors are [T, heads or kv_heads, head_size] in the model's dtype; ``value`` is None if it is a
    part of the key.
    """

    layer: int
    params: AttendParams
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None


_ELSEWHERE = IMAGE_KINDS | {GroupKind.STATE}
"""Kinds of layers, or of their parts, that do not use the attention hook."""


def hook_layers(description: ModelDescription) -> list[LayerSpec]:
    return [layer for layer in description.layers if layer.kind not in _ELSEWHERE]


class PagedStep:
    """One forward pass, with each layer's pages and its group's metadata.

    :ivar queries: for sections that creditors compute; None: all are local.
    """

    def __init__(
        self,
        memory: ModelMemory,
        description: ModelDescription,
        kernels: AttentionKernels,
        batch: ForwardBatch,
        callbacks: LayerCallbacks | None,
    ) -> None:
        self._memory = memory
        self._specs = hook_layers(description)
        self._across = [x.index for x in description.layers if x.kind is GroupKind.CROSS]
        self._kernels = kernels
        self._groups = batch.groups
        self._images = batch.images
        self._both = BothDirections(batch.images.prefix_tokens if batch.images else ())
        self._callbacks = callbacks
        self._attended = 0
        self.dropping = TokenDropping(batch.prompt_ends)
        self.queries: LayerQueries | None = None

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Write K and V, then attend; return [T, heads, size of a value]."""
        spec = self._expect(call)
        pages = self._memory.pages[spec.index]
        group = self._groups[self._memory.groups[spec.index]]
        assert isinstance(group, GroupBatch)
        callbacks = self._callbacks
        params = call.params
        if spec.kind is GroupKind.CHUNKED:
            params = replace(params, chunk_tokens=spec.window_tokens)
        if self.queries is not None:
            self.queries.send_rows(self._attended - 1, call.query, params)
        if spec.kv_of is None:
            value = None if call.value is None else _stored(call.value, pages)
            self._kernels.write_kv(pages, group, _stored(call.key, pages), value)
        if spec.kind is GroupKind.DROPPING:
            self.dropping.choose(spec.window_tokens, pages, group, call.query, params)
        if callbacks is not None:
            callbacks.after_kv_write(spec.index)
            callbacks.before_attend(spec.index, call.query)
        records = None if self.queries is None else self.queries.take_records()
        output = self._both.attend(self._kernels, pages, group, call.query, params, records)
        if callbacks is not None:
            callbacks.after_attend(spec.index, output)
        return output

    def seen_by(self, layer: int) -> Sequence[SeenImages]:
        """Return the images that the step's tokens attend to in a cross-attention layer."""
        if not self._across or self._across.pop(0) != layer:
            raise RuntimeError(f"layer {layer} cross-attends out of turn")
        return self._images.seen if self._images else ()

    def require_complete(self) -> None:
        """Raise unless every layer attended: else the model has a mixer that bypasses the hook.

        :raises RuntimeError: if a layer did not.
        """
        if self._across:
            raise RuntimeError(f"layers {self._across} did not cross-attend")
        if self._attended != len(self._specs):
            raise RuntimeError(f"{self._attended} of {len(self._specs)} layers attended over pages")

    def _expect(self, call: LayerCall) -> LayerSpec:
        """Check that layers attend in order, each once, with the window of their pages.

        Chunks are in the mask of transformers' attention, which is never built here, and not in its
        arguments; budgets are in neither. A module that several layers share does not have its
        layer's index: it is the next one.
        """
        if self._attended == len(self._specs):
            raise RuntimeError(f"layer {call.layer} attends after the last one")
        spec: LayerSpec = self._specs[self._attended]
        window_tokens = spec.window_tokens if spec.kind is GroupKind.SLIDING else 0
        in_turn = call.layer in (spec.index, SHARED_MODULE)
        if not in_turn or call.params.window_tokens != window_tokens:
            raise RuntimeError(
                f"layer {call.layer} attends with window {call.params.window_tokens}, "
                f"expected layer {spec.index} with window {window_tokens}"
            )
        self._attended += 1
        return spec


def _stored(vectors: torch.Tensor, pages: LayerPages) -> torch.Tensor:
    """Convert keys or values to the kernels' form; kernels quantise by themselves."""
    return vectors if pages.quantised else vectors.to(pages.dtype)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over pages; transformers' attention signature.

    q, k, v are [1, heads, T, head_size]. Return [1, T, heads, size of a value] and no weights.
    """
    step: PagedStep = kwargs[STEP_ARGUMENT]
    params = AttendParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window_tokens=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    layer = int(module.layer_idx)
    q = _by_token(query)
    k = _by_token(key)
    latents = latents_of(module)
    if latents is None:
        output = step.attend(LayerCall(layer, params, q, k, _by_token(value)))
    else:
        output = latents.expand(
            step.attend(LayerCall(layer, params, latents.absorb(q), k, value=None))
        )
    return output.unsqueeze(0), None


def _by_token(states: torch.Tensor) -> torch.Tensor:
    return states[0].transpose(0, 1)


AttentionInterface.register(HOOK_NAME, paged_attention)
