"""The attention function that transformers' modelling code calls instead of its own.

The function holds no state: the step arrives as a keyword argument of the
forward pass and carries pages, kernels and callbacks.  So two models, or two
threads, share no global.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.modeling_utils import AttentionInterface

from kvell.attention.interface import AttendParams
from kvell.models.forward.latents import latents_of
from kvell.models.images.image_batch import SeenImages

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


class Step(Protocol):
    """One forward pass over pages."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Write K and V, then attend; return [T, heads, size of a value]."""
        ...

    def seen_by(self, layer: int) -> Sequence[SeenImages]:
        """Return the images that the step's tokens attend to in a cross-attention layer."""
        ...


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
    step: Step = kwargs[STEP_ARGUMENT]
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


def install() -> None:
    """Register the hook with transformers; may be called any number of times."""
    AttentionInterface.register(HOOK_NAME, paged_attention)


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """Map [1, heads, T, size] → [T, heads, size], without a copy."""
    return states[0].transpose(0, 1)
