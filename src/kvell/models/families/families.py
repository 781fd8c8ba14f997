"""The architectures that may run through the attention hook, and why others may not.

This is the only file that names model families. A family is listed as exact once ``tests/models``
compares it with transformers; anything else is refused at start, because a wrong family would not
fail but answer wrongly.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvell.errors import ChangeSomething
from kvell.models.config.config_fields import text_config
from kvell.models.config.state_sizes import MixerKind
from kvell.models.families.sized_families import SIZED
from kvell.models.families.sized_images import SIZED_IMAGES

if TYPE_CHECKING:
    from kvell.models.images.image_families import ImageKind


@dataclass(frozen=True)
class FusedFamily:
    """Facts about a family with a fused pass that its modules do not show.

    The second half are facts that its modules would show: from these and the config,
    ``fused/skeleton`` makes stand-ins, so that transformers' modelling code is not needed.

    :param body: transformers' class without a head; that of the family's name if empty.
    :param norm_offset: added to the weights of its norms.
    :param caps_scores: whether its attention applies ``attn_logit_softcapping``.
    :param mlp: a layer's name for its MLP; ``before_mlp`` for the norm before it.
    :param final_norm: the body's name for the norm before the head.
    :param mixer: a layer's name for its state mixer next to attention; empty if it has none.
    :param activation: the config's field for the activation of its MLPs.
    :param scaled_by: the field whose inverse square root scales scores; a head's size if empty.
    :param attention_bias: the field that gives all of attention's linears a bias; none if empty.
    :param biased_inputs: whether queries, keys and values always have a bias.
    :param mlp_bias: the field that gives the MLP's linears a bias; none if empty.
    :param head_norms: whether queries and keys are normalised by head.
    :param sandwich: whether there are norms after attention and MLP too.
    :param scales_embedding: whether embeddings are scaled by the root of the hidden size.
    :param ropes_by_type: whether layers of each type have a rotation of their own.
    :param rope_layers: the field that selects the layers that rotate; all if empty.
    :param fields: further config fields that matter, besides those of every decoder.
    :param size_defaults: transformers' defaults of fields that files omit and sizes depend on;
        empty if they are not listed.
    """

    model_type: str
    norm_offset: float = 0.0
    caps_scores: bool = False
    mlp: str = "mlp"
    before_mlp: str = "post_attention_layernorm"
    final_norm: str = "norm"
    mixer: str = ""
    activation: str = "hidden_act"
    scaled_by: str = ""
    attention_bias: str = ""
    biased_inputs: bool = False
    mlp_bias: str = ""
    head_norms: bool = False
    sandwich: bool = False
    scales_embedding: bool = False
    ropes_by_type: bool = False
    rope_layers: str = ""
    fields: tuple[str, ...] = ()
    size_defaults: tuple[tuple[str, Any], ...] = ()
    body: str = ""


_UNTIED = (("tie_word_embeddings", False), ("attention_bias", False))
_TIED = (
    ("tie_word_embeddings", True),
    ("attention_bias", False),
    ("attn_logit_softcapping", None),
    ("final_logit_softcapping", None),
    ("use_bidirectional_attention", None),
)
_GEMMA = (*_TIED, ("head_dim", 256))
_NO_WINDOW = (("use_sliding_window", False), ("sliding_window", None), ("layer_types", None))
_WINDOWS = ("layer_types", "sliding_window")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


FUSED: Mapping[str, FusedFamily] = MappingProxyType(
    {
        "FalconH1ForCausalLM": FusedFamily(
            "falcon_h1",
            mlp="feed_forward",
            before_mlp="pre_ff_layernorm",
            final_norm="final_layernorm",
            mixer="mamba",
        ),
        "Gemma2ForCausalLM": FusedFamily(
            "gemma2",
            norm_offset=1.0,
            caps_scores=True,
            activation="hidden_activation",
            scaled_by="query_pre_attn_scalar",
            attention_bias="attention_bias",
            sandwich=True,
            scales_embedding=True,
            fields=(*_WINDOWS, *_CAPS),
            size_defaults=_GEMMA,
        ),
        "Gemma3ForCausalLM": FusedFamily(
            "gemma3_text",
            norm_offset=1.0,
            activation="hidden_activation",
            scaled_by="query_pre_attn_scalar",
            attention_bias="attention_bias",
            head_norms=True,
            sandwich=True,
            scales_embedding=True,
            ropes_by_type=True,
            fields=(*_WINDOWS, *_CAPS, "use_bidirectional_attention"),
            size_defaults=_GEMMA,
            body="Gemma3TextModel",
        ),
        "GemmaForCausalLM": FusedFamily(
            "gemma",
            norm_offset=1.0,
            attention_bias="attention_bias",
            scales_embedding=True,
            fields=("use_bidirectional_attention",),
            size_defaults=_GEMMA,
        ),
        "LlamaForCausalLM": FusedFamily(
            "llama",
            attention_bias="attention_bias",
            mlp_bias="mlp_bias",
            size_defaults=(*_UNTIED, ("mlp_bias", False)),
        ),
        "MinistralForCausalLM": FusedFamily("ministral", fields=_WINDOWS, size_defaults=_UNTIED),
        "MistralForCausalLM": FusedFamily(
            "mistral",
            fields=("sliding_window",),
            size_defaults=(*_UNTIED, ("sliding_window", 4096)),
        ),
        "Qwen2ForCausalLM": FusedFamily(
            "qwen2",
            biased_inputs=True,
            fields=(*_WINDOWS, "use_sliding_window"),
            size_defaults=(*_UNTIED, *_NO_WINDOW),
        ),
        "Qwen3ForCausalLM": FusedFamily(
            "qwen3",
            attention_bias="attention_bias",
            head_norms=True,
            fields=(*_WINDOWS, "use_sliding_window"),
            size_defaults=(*_UNTIED, *_NO_WINDOW, ("head_dim", 128)),
        ),
        "SmolLM3ForCausalLM": FusedFamily(
            "smollm3",
            attention_bias="attention_bias",
            mlp_bias="mlp_bias",
            rope_layers="no_rope_layers",
            fields=(*_WINDOWS, "use_sliding_window"),
            size_defaults=(*_TIED, *_NO_WINDOW, ("mlp_bias", False), ("no_rope_layers", [])),
        ),
    }
)
"""Decoders whose modules fit a recipe (``fused/recipe``)."""

EXACT = frozenset(
    {"Gemma4ForCausalLM", *FUSED, *(family.architecture for family in SIZED.values())}
)
"""Architectures whose paged forward pass is tested against transformers' own."""

WITH_IMAGES: "Mapping[str, ImageKind]" = MappingProxyType(
    {
        "InternVLForConditionalGeneration": "pieces",
        "LlavaOnevisionForConditionalGeneration": "patches",
        "MllamaForConditionalGeneration": "cross",
        "PaliGemmaForConditionalGeneration": "prefix",
        "Qwen2VLForConditionalGeneration": "grids",
        "Qwen2_5_VLForConditionalGeneration": "grids",
    }
)
"""Architectures of images and text, tested in the same way, and the kind of their images. Their
text is an architecture in ``EXACT``, or has modules of its own (``OWN_TEXT``)."""

OWN_TEXT: "frozenset[ImageKind]" = frozenset({"cross", "grids"})
"""Kinds whose text cross-attends to images, or has row and column positions."""

CROSS_MODULES = frozenset({"MllamaTextCrossAttention"})
"""Modules of transformers that cross-attend to images."""

RECURRENT = "needs its own mixer: state leaks between flattened requests"
INDEX = "needs an index cache: it chooses the tokens that it reads"
CROSS = "needs cross-attention groups: its text attends to images or an encoder"
IMAGES = "needs an encoder of images: only its text could be served"
AUDIO = "needs an encoder of audio: only its text could be served"

MIXER_KINDS: Mapping[str, MixerKind] = MappingProxyType(
    {
        "BambaMixer": "scalar-decay",
        "FalconH1Mixer": "scalar-decay",
        "FalconMambaMixer": "selective",
        "GraniteMoeHybridMambaLayer": "scalar-decay",
        "JambaMambaMixer": "selective",
        "KimiLinearDeltaAttention": "channel-delta",
        "Lfm2MoeShortConv": "convolution",
        "Lfm2ShortConv": "convolution",
        "Mamba2Mixer": "scalar-decay",
        "MambaMixer": "selective",
        "MiniMaxLightningAttention": "lightning",
        "NemotronHMamba2Mixer": "scalar-decay",
        "Qwen3_5GatedDeltaNet": "gated-delta",
        "Qwen3_5MoeGatedDeltaNet": "gated-delta",
        "OlmoHybridGatedDeltaNet": "gated-delta",
        "Qwen3NextGatedDeltaNet": "gated-delta",
        "Zamba2MambaMixer": "scalar-decay",
    }
)
"""Modules of transformers that keep a state, and our mixer that replaces each."""

UNKNOWN = "is not among the architectures tested to be exact: it needs a test of its own"


def family_names() -> list[str]:
    named = {re.sub(r"For(CausalLM|ConditionalGeneration)$", "", name) for name in EXACT}
    return sorted(named | {name.partition("For")[0] for name in WITH_IMAGES}, key=str.lower)


def require_exact(architecture: str, need: str = UNKNOWN) -> None:
    """Raise unless an architecture's paged forward pass is known to be exact.

    :param need: the missing feature (``refusals.find_needed``).
    :raises ChangeSomething: naming the architecture and the missing feature.
    """
    if architecture in EXACT or architecture in WITH_IMAGES:
        return
    raise ChangeSomething(
        "model",
        architecture,
        need,
        f"use one of {', '.join(family_names())}",
    )


def classes_of(name: str) -> set[str]:
    return {name, FUSED[name].body or name.replace("ForCausalLM", "Model")}


def fused_class(config: Any) -> str | None:
    """Return a config's class with a fused pass; None without one, or if checks remain."""
    named = getattr(config, "architectures", None) or ()
    model_type = getattr(config, "model_type", None)
    classes = (name for name, family in FUSED.items() if family.model_type == model_type)
    fused = next(classes, None)
    if (
        fused is None
        or not set(named) <= classes_of(fused)
        or getattr(config, "quantization_config", None)
    ):
        return None
    return fused


def listed_class(config: object) -> str | None:
    """Return the exact class of a config whose type and class are listed here; else None."""
    named: Iterable[str] = getattr(config, "architectures", None) or ()
    model_type = getattr(config, "model_type", None)
    for name, family in FUSED.items():
        if family.model_type == model_type and set(named) <= classes_of(name):
            return name
    images = SIZED_IMAGES.get(str(model_type))
    if images and set(named) <= {images.architecture}:
        text = getattr(text_config(config), "model_type", None)
        return images.architecture if text in images.texts else None
    sized = SIZED.get(str(model_type))
    return sized.architecture if sized and set(named) <= {sized.architecture} else None
