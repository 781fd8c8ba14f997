"""Stand-ins for a decoder's modules, over the tensors of its files, without code to run them.

A compiled pass reads names, sizes and numbers of modules and never calls one. transformers' own
modules take seconds to import; these have only the parts that a recipe reads. They are made only if
the files hold exactly the tensors that the family has, each of its shape: anything unusual is left
to transformers to load or refuse.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

from kvell.models.config.config_fields import head_size
from kvell.models.families.families import FUSED, FusedFamily
from kvell.models.families.plain_weights import dense_layer
from kvell.models.families.tensor_shapes import Shapes, numbered_shapes
from kvell.models.fused.recipe import STATIC_ROPES

Tensors = Mapping[str, torch.Tensor]
Made = TypeVar("Made", bound=nn.Module)

BODY = "model."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_AS_THEY_ARE = (torch.float32, torch.bfloat16)
"""Matrices of these dtypes are rounded while they are packed; others before."""


class GELUTanh(nn.Module):
    """Stand-in for transformers' activation of the same name."""


_ACTIVATIONS: Mapping[str, type[nn.Module]] = {"silu": nn.SiLU, "gelu_pytorch_tanh": GELUTanh}


class Part(nn.Module):
    """A module with named parts and a few attributes."""

    def __init__(self, parts: Mapping[str, nn.Module], **facts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        for name, fact in facts.items():
            setattr(self, name, fact)


class DecoderSkeleton(Part):
    """Stand-in for a causal language model of transformers, on the CPU.

    :ivar stands_for: the class that transformers would run.
    :ivar dtype: the model is served in it. Matrices keep the numbers of their file, which are
        rounded when they are packed; everything else is rounded already.
    """

    stands_for: str
    dtype: torch.dtype
    device = torch.device("cpu")


def skeleton_of(
    config: Any, name: str, tensors: Tensors, dtype: torch.dtype
) -> DecoderSkeleton | None:
    """Make modules over a model's tensors; return None if they do not match the family.

    :param tensors: by name, as the files have them; names of a body alone may lack ``model.``.
    :param dtype: the model is served in it.
    """
    family = FUSED[name]
    if family.mixer:
        return None
    tensors = _with_prefix(tensors)
    layer = dense_layer(config, family)
    activation = _ACTIVATIONS.get(getattr(config, family.activation))
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if activation is None or shapes != _tensors(config, family, layer):
        return None
    rotary = _rotary(config, family)
    if rotary is None:
        return None
    made = _Modules(config, family, tensors, dtype, activation())
    embedding = made.embedding()
    body = Part(
        {
            "embed_tokens": embedding,
            "layers": nn.ModuleList(
                made.layer(index, layer) for index in range(config.num_hidden_layers)
            ),
            family.final_norm: made.norm(f"model.{family.final_norm}"),
            "rotary_emb": rotary,
        }
    )
    head = made.linear("lm_head", embedding.weight if config.tie_word_embeddings else None)
    return DecoderSkeleton(
        {"model": body, "lm_head": head}, config=config, stands_for=name, dtype=dtype
    )


def _with_prefix(tensors: Tensors) -> Tensors:
    """Return tensors by their names in the whole model; files of a body alone leave out its own."""
    if any(name.startswith(BODY) for name in tensors):
        return tensors
    return {name if name == HEAD else BODY + name: tensor for name, tensor in tensors.items()}


def _tensors(config: Any, family: FusedFamily, layer: Shapes) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden)}
    shapes[f"model.{family.final_norm}.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes | numbered_shapes("model.layers", config.num_hidden_layers, layer)


class _Modules:
    def __init__(
        self,
        config: Any,
        family: FusedFamily,
        tensors: Tensors,
        dtype: torch.dtype,
        activation: nn.Module,
    ) -> None:
        self._config, self._family = config, family
        self._tensors, self._dtype, self._activation = tensors, dtype, activation

    def layer(self, index: int, tensors: Shapes) -> Part:
        parts: dict[str, dict[str, nn.Module]] = {"self_attn": {}, self._family.mlp: {}, "": {}}
        for tensor, shape in tensors.items():
            name, _, kind = tensor.rpartition(".")
            owner, _, own = name.rpartition(".")
            if kind == "weight":
                make = self.linear if len(shape) == 2 else self.norm
                parts[owner][own] = make(f"model.layers.{index}.{name}")
        attention = Part(parts["self_attn"], **self._attention_facts(index))
        mlp = Part(parts[self._family.mlp] | {"act_fn": self._activation})
        return Part(parts[""] | {"self_attn": attention, self._family.mlp: mlp})

    def _attention_facts(self, index: int) -> dict[str, Any]:
        config, family = self._config, self._family
        scaled = getattr(config, family.scaled_by) if family.scaled_by else None
        size = scaled or head_size(config, family.model_type)
        facts: dict[str, Any] = {"scaling": size**-0.5}
        if family.caps_scores:
            facts["attn_logit_softcapping"] = config.attn_logit_softcapping
        if family.ropes_by_type:
            facts["layer_type"] = config.layer_types[index]
        if family.rope_layers:
            facts["use_rope"] = getattr(config, family.rope_layers)[index]
        return facts

    def embedding(self) -> nn.Embedding:
        """Make the embedding; a tied head uses its weight too."""
        made = _bare(nn.Embedding)
        made.num_embeddings, made.embedding_dim = self._tensors[EMBEDDING].shape
        made.weight = self._matrix(EMBEDDING)
        if self._family.scales_embedding:
            made.scalar_embed_scale = self._config.hidden_size**0.5
        return made

    def linear(self, name: str, tied: torch.Tensor | None = None) -> nn.Linear:
        """Make a linear.

        :param tied: the weight that it shares with another module; None for its own.
        """
        made = _bare(nn.Linear)
        made.weight = self._matrix(f"{name}.weight") if tied is None else cast(nn.Parameter, tied)
        made.out_features, made.in_features = made.weight.shape
        has_bias = f"{name}.bias" in self._tensors
        made.register_parameter("bias", self._rounded(f"{name}.bias") if has_bias else None)
        return made

    def norm(self, name: str) -> Part:
        weight = self._rounded(f"{name}.weight")
        return Part({}, weight=weight, eps=self._config.rms_norm_eps)

    def _matrix(self, name: str) -> nn.Parameter:
        tensor = self._tensors[name]
        return _fixed(tensor if tensor.dtype in _AS_THEY_ARE else tensor.to(self._dtype))

    def _rounded(self, name: str) -> nn.Parameter:
        return _fixed(self._tensors[name].to(self._dtype, copy=True))


def _rotary(config: Any, family: FusedFamily) -> Part | None:
    """Return rotations as transformers computes them; None if one depends on a request's length."""
    if not family.ropes_by_type:
        kind = config.rope_parameters["rope_type"]
        if kind not in STATIC_ROPES:
            return None
        frequencies, factor = _rotation(config, kind, None)
        return Part({}, rope_type=kind, inv_freq=frequencies, attention_scaling=factor)
    facts: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for layer_type in sorted(set(config.layer_types)):
        kind = (config.rope_parameters.get(layer_type) or {}).get("rope_type")
        if kind not in STATIC_ROPES:
            return None
        kinds[layer_type] = kind
        frequencies, factor = _rotation(config, kind, layer_type)
        facts |= {
            f"{layer_type}_inv_freq": frequencies,
            f"{layer_type}_attention_scaling": factor,
        }
    return Part({}, rope_type=kinds, **facts)


def _rotation(config: Any, kind: str, layer_type: str | None) -> tuple[torch.Tensor, float]:
    """Return frequencies, float32 [half of a head], and the factor of cosines and sines."""
    if kind != "default":
        # Imported here: it imports much of transformers.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        of_type = {} if layer_type is None else {"layer_type": layer_type}
        made: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[kind](config, None, **of_type)
        return made
    parameters = config.rope_parameters
    base = (parameters if layer_type is None else parameters[layer_type])["rope_theta"]
    size = head_size(config, config.model_type)
    return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float) / size), 1.0


def _bare(kind: type[Made]) -> Made:
    """Make an instance without numbers of its own; the caller sets its attributes."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    return made


def _fixed(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
