"""Bytes of the state that a recurrent layer keeps for all earlier tokens, from a config alone.

A layer's state is a window of inputs to its short convolution and a recurrent state. Families are
distinguished by the fields of their configs, never by name. Sources: the caches of transformers'
own modeling files; vLLM's state shapes agree.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvell.errors import ChangeSomething
from kvell.models.config.config_fields import first_size, head_size, optional_size

MixerKind = Literal[
    "selective", "scalar-decay", "gated-delta", "channel-delta", "lightning", "convolution"
]
"""The kinds of state mixers, which ``states/mixers`` computes."""
FLOAT32_BYTES = 4
LEAST_ELEMENT_BYTES = 2
"""States stay in 16 bits or more if keys and values are quantised: errors would add up."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class StateShapes:
    """Shapes of the state that a layer keeps for all earlier tokens.

    :param channels: channels of its convolution.
    :param window: earlier inputs that the convolution reads, in the model's dtype.
    :param recurrent: shape of the recurrent state; () if there is none.
    :param float32: whether the recurrent state is float32 whatever the model's dtype.
    """

    channels: int
    window: int
    recurrent: tuple[int, ...]
    float32: bool = False

    @property
    def window_size(self) -> int:
        return self.channels * self.window

    @property
    def recurrent_size(self) -> int:
        return math.prod(self.recurrent) if self.recurrent else 0


def state_bytes(text: Any, element_bytes: int, name: str) -> int:
    """Return the bytes of one recurrent layer's state.

    :param element_bytes: size of the model's dtype; for the recurrent part,
        ``mamba_ssm_cache_dtype`` and the family's own rule take precedence.
    :raises ChangeSomething: if the config has the fields of no known recurrence.
    """
    shapes = state_shapes(text, name)
    element_bytes = max(element_bytes, LEAST_ELEMENT_BYTES)
    recurrent_bytes = FLOAT32_BYTES if shapes.float32 else _ssm_bytes(text, element_bytes)
    return shapes.window_size * element_bytes + shapes.recurrent_size * recurrent_bytes


def state_shapes(text: Any, name: str) -> StateShapes:
    """Return the shapes of one layer's state, by the first rule whose fields the config has.

    :raises ChangeSomething: if no rule matches.
    """
    for fields, rule in RULES:
        if _has(text, fields):
            return rule(text, name)
    raise ChangeSomething(
        "model",
        name,
        "has recurrent layers whose state's shape is not known",
        "use a model with attention, or one of the known state space and linear attention kinds",
    )


def is_recurrent(text: Any) -> bool:
    return any(_has(text, fields) for fields, _ in RULES)


def _has(text: Any, fields: tuple[str, ...]) -> bool:
    return all(getattr(text, field, None) is not None for field in fields)


def _ssm_bytes(text: Any, element_bytes: int) -> int:
    return DTYPE_BYTES.get(str(getattr(text, "mamba_ssm_cache_dtype", None)), element_bytes)


def _inner_size(text: Any, name: str) -> int:
    expand = first_size(text, ("mamba_expand", "expand"), name)
    return expand * first_size(text, ("hidden_size",), name)


def _mamba1(text: Any, name: str) -> StateShapes:
    inner = _inner_size(text, name)
    kernel = first_size(text, ("mamba_d_conv", "conv_kernel"), name)
    state = first_size(text, ("mamba_d_state", "state_size"), name)
    return StateShapes(inner, kernel - 1, (inner, state))


def _mamba2(text: Any, name: str) -> StateShapes:
    heads = first_size(text, ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), name)
    size = first_size(text, ("mamba_d_head", "mamba_head_dim", "mamba_headdim"), name)
    state = first_size(text, ("mamba_d_state", "ssm_state_size"), name)
    groups = first_size(text, ("mamba_n_groups", "mamba_ngroups", "n_groups"), name)
    kernel = first_size(text, ("mamba_d_conv", "conv_kernel"), name)
    return _mamba2_shapes(heads, size, groups, state, kernel)


def _pure_mamba2(text: Any, name: str) -> StateShapes:
    fields = ("num_heads", "head_dim", "state_size", "conv_kernel")
    heads, size, state, kernel = (first_size(text, (field,), name) for field in fields)
    return _mamba2_shapes(heads, size, int(text.n_groups), state, kernel)


def _mamba2_shapes(heads: int, size: int, groups: int, state: int, kernel: int) -> StateShapes:
    return StateShapes(heads * size + 2 * groups * state, kernel - 1, (heads, size, state))


def _gated_delta_net(text: Any, name: str) -> StateShapes:
    key_size = first_size(text, ("linear_key_head_dim",), name)
    value_size = first_size(text, ("linear_value_head_dim",), name)
    keys = first_size(text, ("linear_num_key_heads",), name) * key_size
    heads = first_size(text, ("linear_num_value_heads",), name)
    window = first_size(text, ("linear_conv_kernel_dim",), name) - 1
    return StateShapes(2 * keys + heads * value_size, window, (heads, key_size, value_size))


def _kimi_delta(text: Any, name: str) -> StateShapes:
    heads = first_size(text, ("linear_num_heads",), name)
    size = first_size(text, ("linear_head_dim",), name)
    window = first_size(text, ("linear_conv_kernel_dim",), name) - 1
    return StateShapes(3 * heads * size, window, (heads, size, size), float32=True)


def _short_convolution(text: Any, name: str) -> StateShapes:
    window = first_size(text, ("conv_L_cache",), name) - 1
    return StateShapes(first_size(text, ("hidden_size",), name), window, ())


def _lightning(text: Any, name: str) -> StateShapes:
    heads = first_size(text, ("num_attention_heads",), name)
    size = head_size(text, name)
    return StateShapes(0, 0, (heads, size, size))


def _rg_lru(text: Any, name: str) -> StateShapes:
    width = optional_size(text, ("lru_width",)) or first_size(text, ("hidden_size",), name)
    window = first_size(text, ("conv1d_width",), name) - 1
    return StateShapes(width, window, (width,), float32=True)


def _rwkv(text: Any, name: str) -> StateShapes:
    """Return the last input of both mixers; numerator, denominator and maximum in float32."""
    hidden = first_size(text, ("hidden_size",), name)
    return StateShapes(2 * hidden, 1, (3, hidden), float32=True)


def _xlstm(text: Any, name: str) -> StateShapes:
    heads = first_size(text, ("num_heads",), name)
    keys, values = int(text.qk_head_dim), int(text.v_head_dim)
    return StateShapes(0, 0, (heads, keys * values + keys + 1), float32=True)


RULES: tuple[tuple[tuple[str, ...], Callable[[Any, str], StateShapes]], ...] = (
    (("linear_key_head_dim", "linear_num_value_heads"), _gated_delta_net),
    (("linear_head_dim", "linear_num_heads"), _kimi_delta),
    (("mamba_n_heads", "mamba_d_head"), _mamba2),
    (("mamba_num_heads", "mamba_head_dim"), _mamba2),
    (("n_mamba_heads", "mamba_headdim"), _mamba2),
    (("num_heads", "state_size", "n_groups"), _pure_mamba2),
    (("mamba_d_conv", "mamba_d_state"), _mamba1),
    (("conv_kernel", "state_size"), _mamba1),
    (("conv_L_cache",), _short_convolution),
    (("linear_attn_alpha_factor",), _lightning),
    (("conv1d_width", "attention_window_size"), _rg_lru),
    (("attention_hidden_size", "rescale_every"), _rwkv),
    (("inference_state_dtype", "qk_head_dim"), _xlstm),
)
"""The fields that identify each recurrence, most specific first."""
