"""The recipe of a decoder, from its modules; None if any part is unusual.

A recipe is made only if the compiled pass has every part of every layer by its name. Otherwise an
unknown part would be left out in silence.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from kvell.attention.checks import UNIT
from kvell.models.config.description import ModelDescription
from kvell.models.families.families import FUSED, FusedFamily
from kvell.models.fused.mixer_recipe import MixerRecipe, MixerShape, mixer_recipe
from kvell.models.fused.need import DecoderShape
from kvell.models.fused.packing import PANEL
from kvell.models.fused.parts import NormRecipe, RopeRecipe, ScaledLinear
from kvell.pages.layout import GroupKind, LayerSpec

Activation = Literal["silu", "gelu_tanh"]

ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
"""Activations by the class that computes them."""

STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotation whose frequencies do not depend on the length of a request."""

_KINDS = frozenset({GroupKind.FULL, GroupKind.SLIDING})
_SANDWICH = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True)
class LayerRecipe:
    """One layer's modules, and the parameters of its attention.

    :param norms: before attention, of queries, of keys, after attention, before the MLP, after it.
    :param attention: queries, keys and values; ``gates``: gates and ups of the MLP.
    :param out_factor: multiplies attention's addition to the stream; ``down_factor`` the MLP's.
    :param mixer: next to attention, over the same normalised rows.
    :param rope: index of its rotation; -1 for none.
    """

    norms: tuple[NormRecipe | None, ...]
    attention: tuple[ScaledLinear, ...]
    out_proj: Any
    out_factor: float
    gates: tuple[ScaledLinear, ScaledLinear]
    down_proj: Any
    down_factor: float
    mixer: MixerRecipe | None
    rope: int
    scale: float
    softcap: float
    window_tokens: int

    @property
    def packed_inner(self) -> int:
        half = PANEL // 2
        return -(-int(self.gates[0].linear.out_features) // half) * half

    @property
    def inputs(self) -> tuple[ScaledLinear, ...]:
        return self.attention if self.mixer is None else (*self.attention, self.mixer.in_proj)

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        made = [scaled.linear for scaled in (*self.inputs, *self.gates)]
        made += [] if self.mixer is None else [self.mixer.out_proj]
        return (*made, self.out_proj, self.down_proj)


@dataclass(frozen=True)
class DecoderRecipe:
    """The facts about a model that a compiled pass needs.

    :param dtype: the dtype of products; weights of linears in another dtype are rounded to it.
    """

    dtype: torch.dtype
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
    mixer: MixerShape | None

    @property
    def shape(self) -> DecoderShape:
        """The sizes that determine the pass's buffers."""
        first = self.layers[0]
        mixer = self.mixer
        return DecoderShape(
            hidden=self.head.in_features,
            attended=self.heads * self.head_size,
            projected=sum(part.linear.out_features for part in first.inputs),
            inner=first.packed_inner,
            rotated=sum(2 * rope.frequencies.numel() for rope in self.ropes),
            vocab=self.head.out_features,
            element_bytes=self.dtype.itemsize,
            mixed=0 if mixer is None else mixer.mixed,
            gated=0 if mixer is None else mixer.inner,
        )


def recipe_of(module: Any, description: ModelDescription) -> DecoderRecipe | None:
    """Return the recipe of a transformers causal LM; None if any part of it is unusual."""
    family = FUSED.get(class_name(module))
    if family is None or not _plain(module, family):
        return None
    body = module.model
    specs = _attention_specs(description, family)
    shapes = {(layer.kv_heads, layer.head_size) for layer in specs}
    if len(shapes) != 1 or len(body.layers) != len(specs):
        return None
    (kv_heads, head_size) = shapes.pop()
    ropes = _Ropes(body.rotary_emb)
    if head_size % UNIT:
        return None
    made = [
        _layer(layer, spec, family, ropes) for layer, spec in zip(body.layers, specs, strict=True)
    ]
    layers = tuple(layer for layer in made if layer is not None)
    mixers = {layer.mixer.shape for layer in layers if layer.mixer is not None}
    if len(layers) != len(made) or len(mixers) > 1:
        return None
    activation = _activation(body.layers, family)
    if activation is None or any(rope.frequencies.numel() * 2 != head_size for rope in ropes.used):
        return None
    final_norm = _norm(getattr(body, family.final_norm), family)
    return DecoderRecipe(
        dtype=module.dtype,
        heads=description.query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        activation=activation,
        embedding=body.embed_tokens,
        embedding_scale=_embedding_scale(body),
        layers=layers,
        ropes=tuple(ropes.used),
        # Only the head reads this norm, so the norm's weight takes in a factor of the logits.
        final_norm=replace(
            final_norm, weight=final_norm.weight * _factor(body, "lm_head_multiplier")
        ),
        head=module.lm_head,
        softcap=float(getattr(module.config, "final_logit_softcapping", None) or 0.0),
        mixer=mixers.pop() if mixers else None,
    )


def class_name(module: Any) -> str:
    return str(getattr(module, "stands_for", type(module).__name__))


def _attention_specs(description: ModelDescription, family: FusedFamily) -> list[LayerSpec]:
    """Return the attention layers; none unless layers have attention alone, or with a state if the
    family has mixers."""
    specs = [layer for layer in description.layers if layer.kind in _KINDS and layer.kv_of is None]
    states = [layer for layer in description.layers if layer.kind is GroupKind.STATE]
    wanted = [layer.index for layer in specs] if family.mixer else []
    is_complete = len(specs) + len(states) == len(description.layers)
    return specs if is_complete and wanted == [layer.index for layer in states] else []


def _plain(module: Any, family: FusedFamily) -> bool:
    return (
        _names(module) == {"model", "lm_head"}
        and _names(module.model) == {"embed_tokens", "layers", family.final_norm, "rotary_emb"}
        and type(module.lm_head) is nn.Linear
        and module.lm_head.bias is None
    )


def _activation(layers: Iterable[Any], family: FusedFamily) -> Activation | None:
    """Return the activation of all layers' MLPs; None if they differ or it is unknown."""
    kinds = {ACTIVATIONS.get(type(getattr(layer, family.mlp).act_fn).__name__) for layer in layers}
    return kinds.pop() if len(kinds) == 1 else None


def _layer(layer: Any, spec: LayerSpec, family: FusedFamily, ropes: "_Ropes") -> LayerRecipe | None:
    if not _is_usual(layer, family):
        return None
    attention = layer.self_attn
    mlp = getattr(layer, family.mlp)
    rope = ropes.index_of(attention)
    mixer = None
    if family.mixer:
        mixer = mixer_recipe(getattr(layer, family.mixer), _factor(layer, "ssm_out_multiplier"))
    if rope is None or (mixer is None) is bool(family.mixer):
        return None
    inputs, keys = _factor(layer, "attention_in_multiplier"), _factor(attention, "key_multiplier")
    return LayerRecipe(
        norms=_norms(layer, family),
        attention=(
            ScaledLinear(attention.q_proj, inputs),
            ScaledLinear(attention.k_proj, inputs, keys),
            ScaledLinear(attention.v_proj, inputs),
        ),
        out_proj=attention.o_proj,
        out_factor=_factor(layer, "attn_out_multiplier"),
        gates=(
            ScaledLinear(mlp.gate_proj, outputs=_factor(mlp, "gate_multiplier")),
            ScaledLinear(mlp.up_proj),
        ),
        down_proj=mlp.down_proj,
        down_factor=_factor(mlp, "down_multiplier"),
        mixer=mixer,
        rope=rope,
        scale=float(attention.scaling),
        softcap=float(attention.attn_logit_softcapping or 0.0) if family.caps_scores else 0.0,
        window_tokens=spec.window_tokens if spec.kind is GroupKind.SLIDING else 0,
    )


def _is_usual(layer: Any, family: FusedFamily) -> bool:
    """Return whether a layer has the usual parts, with or without norms after attention and MLP."""
    names = {"self_attn", family.mlp, "input_layernorm", family.before_mlp, family.mixer} - {""}
    if _names(layer) not in (names, names | _SANDWICH):
        return False
    attention = layer.self_attn
    mlp = getattr(layer, family.mlp)
    if _names(attention) - _HEAD_NORMS != _ATTENTION or _names(mlp) != _MLP:
        return False
    linears = [getattr(attention, name) for name in _ATTENTION]
    linears += [getattr(mlp, name) for name in _MLP - {"act_fn"}]
    return all(type(linear) is nn.Linear for linear in linears)


def _norms(layer: Any, family: FusedFamily) -> tuple[NormRecipe | None, ...]:
    attention = layer.self_attn
    before_mlp = getattr(layer, family.before_mlp)
    after = (None, None)
    if _names(layer) >= _SANDWICH:
        after = (before_mlp, layer.post_feedforward_layernorm)
        before_mlp = layer.pre_feedforward_layernorm
    norms = (
        layer.input_layernorm,
        getattr(attention, "q_norm", None),
        getattr(attention, "k_norm", None),
        after[0],
        before_mlp,
        after[1],
    )
    return tuple(None if norm is None else _norm(norm, family) for norm in norms)


def _embedding_scale(body: Any) -> float:
    own = float(getattr(body.embed_tokens, "scalar_embed_scale", 1.0))
    return own * _factor(body, "embedding_multiplier")


def _factor(module: Any, name: str) -> float:
    return float(getattr(module, name, 1.0))


def _norm(norm: Any, family: FusedFamily) -> NormRecipe:
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return NormRecipe(norm.weight.detach().float() + family.norm_offset, float(epsilon))


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


class _Ropes:
    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._indices: dict[str, int] = {}
        self.used: list[RopeRecipe] = []

    def index_of(self, attention: Any) -> int | None:
        """Return the index of a layer's rotation; -1 for none, None if it changes with length."""
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
    for layer in recipe.layers:
        yield from layer.linears
    yield recipe.head
