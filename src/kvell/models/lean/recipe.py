"""What a dense decoder is made of, read from its modules; None where anything is unusual.

A recipe is made only if every part of every layer is one that the compiled pass has, under
the name it has there: a part that nobody asked about would otherwise be left out in silence.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from kvell.models.description import ModelDescription
from kvell.models.families import LEAN, LeanFamily
from kvell.pages.layout import GroupKind, LayerSpec

Activation = Literal["silu", "gelu_tanh"]

ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
"""By the class that computes them."""

STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotation whose frequencies do not follow the length of a request."""

_KINDS = frozenset({GroupKind.FULL, GroupKind.SLIDING})
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_SANDWICH = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True)
class NormRecipe:
    """weight: float32 [size], what a normalised row is multiplied by."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True)
class RopeRecipe:
    """frequencies: float32 [head_size / 2]; factor: of cosines and sines."""

    frequencies: torch.Tensor
    factor: float


@dataclass(frozen=True)
class LayerRecipe:
    """One layer's modules, and what it does with its scores.

    :param norms: before attention, of queries, of keys, after attention, before the MLP, after it.
    :param rope: index of its rotation; -1 for none.
    """

    norms: tuple[NormRecipe | None, ...]
    attention: Any
    mlp: Any
    rope: int
    scale: float
    softcap: float
    window_tokens: int


@dataclass(frozen=True)
class DecoderRecipe:
    """All that a compiled pass needs to know of a model."""

    heads: int
    kv_heads: int
    head_size: int
    activation: Activation
    embedding: Any
    embedding_scale: float
    layers: tuple[LayerRecipe, ...]
    ropes: tuple[RopeRecipe, ...]
    final_norm: NormRecipe
    head: Any
    softcap: float


def recipe_of(module: Any, description: ModelDescription) -> DecoderRecipe | None:
    """A transformers causal LM as a recipe; None if it is not one of plain dense layers."""
    family = LEAN.get(type(module).__name__)
    layers = description.layers
    if family is None or any(
        layer.kind not in _KINDS or layer.kv_of is not None for layer in layers
    ):
        return None
    shapes = {(layer.kv_heads, layer.head_size) for layer in layers}
    body = module.model
    if len(shapes) != 1 or len(body.layers) != len(layers) or not _plain(body, module):
        return None
    (kv_heads, head_size), ropes = shapes.pop(), _Ropes(body.rotary_emb)
    made = [
        _layer(layer, spec, family, ropes) for layer, spec in zip(body.layers, layers, strict=True)
    ]
    activations = {ACTIVATIONS.get(type(layer.mlp.act_fn).__name__) for layer in body.layers}
    activation = activations.pop() if len(activations) == 1 else None
    if activation is None or any(rope.frequencies.numel() * 2 != head_size for rope in ropes.used):
        return None
    found = tuple(layer for layer in made if layer is not None)
    if len(found) != len(made):
        return None
    return DecoderRecipe(
        heads=description.query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        activation=activation,
        embedding=body.embed_tokens,
        embedding_scale=float(getattr(body.embed_tokens, "scalar_embed_scale", 1.0)),
        layers=found,
        ropes=tuple(ropes.used),
        final_norm=_norm(body.norm, family),
        head=module.lm_head,
        softcap=float(getattr(module.config, "final_logit_softcapping", None) or 0.0),
    )


def _plain(body: Any, module: Any) -> bool:
    """No part beside the usual ones, and a head without a bias."""
    return (
        _names(module) == {"model", "lm_head"}
        and _names(body) == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and type(module.lm_head) is nn.Linear
        and module.lm_head.bias is None
    )


def _layer(layer: Any, spec: LayerSpec, family: LeanFamily, ropes: "_Ropes") -> LayerRecipe | None:
    attention, mlp, sandwich = layer.self_attn, layer.mlp, _names(layer) >= _SANDWICH
    linears = [getattr(attention, name, None) for name in sorted(_ATTENTION)]
    linears += [getattr(mlp, name, None) for name in sorted(_MLP - {"act_fn"})]
    rope = ropes.index_of(attention)
    usual = (
        _names(layer) - _SANDWICH == _LAYER
        and _names(attention) - _HEAD_NORMS == _ATTENTION
        and _names(mlp) == _MLP
        and all(type(linear) is nn.Linear for linear in linears)
    )
    if not usual or rope is None:
        return None
    between = (
        (layer.post_attention_layernorm, layer.pre_feedforward_layernorm)
        if sandwich
        else (None, layer.post_attention_layernorm)
    )
    norms = (
        layer.input_layernorm,
        getattr(attention, "q_norm", None),
        getattr(attention, "k_norm", None),
        *between,
        layer.post_feedforward_layernorm if sandwich else None,
    )
    return LayerRecipe(
        norms=tuple(None if norm is None else _norm(norm, family) for norm in norms),
        attention=attention,
        mlp=mlp,
        rope=rope,
        scale=float(attention.scaling),
        softcap=float(attention.attn_logit_softcapping or 0.0) if family.caps_scores else 0.0,
        window_tokens=spec.window_tokens if spec.kind is GroupKind.SLIDING else 0,
    )


def _norm(norm: Any, family: LeanFamily) -> NormRecipe:
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return NormRecipe(norm.weight.detach().float() + family.norm_offset, float(epsilon))


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


class _Ropes:
    """The rotations that layers use, each once."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._indices: dict[str, int] = {}
        self.used: list[RopeRecipe] = []

    def index_of(self, attention: Any) -> int | None:
        """Of a layer; -1 if it has none, None if its rotation changes with length."""
        if not getattr(attention, "use_rope", True):
            return -1
        single = hasattr(self._rotary, "inv_freq")
        prefix = "" if single else f"{attention.layer_type}_"
        kinds = self._rotary.rope_type
        kind = kinds if isinstance(kinds, str) else kinds.get(prefix.removesuffix("_"))
        if kind not in STATIC_ROPES:
            return None
        if prefix not in self._indices:
            self._indices[prefix] = len(self.used)
            frequencies = getattr(self._rotary, f"{prefix}inv_freq").detach().float()
            factor = float(getattr(self._rotary, f"{prefix}attention_scaling"))
            self.used.append(RopeRecipe(frequencies, factor))
        return self._indices[prefix]


def weights_of(recipe: DecoderRecipe) -> Iterable[nn.Linear]:
    """Every linear that is packed, the head last."""
    for layer in recipe.layers:
        attention, mlp = layer.attention, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    yield recipe.head
