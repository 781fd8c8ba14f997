"""Shapes that the tensors of a GGUF file must have by its metadata.

A size that only the metadata say would be believed: a damaged one could ask for terabytes.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Shape = tuple[int, ...]
Fields = Mapping[str, Any]


def _heads(config: Fields, *kinds: str) -> int:
    return int(config["head_dim"] * sum(config[f"num_{kind}_heads"] for kind in kinds))


def _width(config: Fields, *sizes: str) -> int:
    return int(sum(config[size] for size in sizes))


def _states(config: Fields) -> int:
    return int(2 * config["mamba_n_groups"] * config["mamba_d_state"])


_QUERIES, _KEYS = "attention", "key_value"
_ROWS: Mapping[str, Callable[[Fields], int]] = MappingProxyType(
    {
        "model.embed_tokens": lambda config: _width(config, "vocab_size"),
        "lm_head": lambda config: _width(config, "vocab_size"),
        "q_proj": lambda config: _heads(config, _QUERIES),
        "k_proj": lambda config: _heads(config, _KEYS),
        "v_proj": lambda config: _heads(config, _KEYS),
        "qkv_proj": lambda config: _heads(config, _QUERIES, _KEYS, _KEYS),
        "gate_proj": lambda config: _width(config, "intermediate_size"),
        "up_proj": lambda config: _width(config, "intermediate_size"),
        "gate_up_proj": lambda config: 2 * _width(config, "intermediate_size"),
        "w1": lambda config: _width(config, "intermediate_size"),
        "w3": lambda config: _width(config, "intermediate_size"),
        "conv.in_proj": lambda config: 3 * _width(config, "hidden_size"),
        "mamba.in_proj": lambda config: (
            2 * _width(config, "mamba_d_ssm") + _states(config) + _width(config, "mamba_n_heads")
        ),
        "mamba.conv1d": lambda config: _width(config, "mamba_d_ssm") + _states(config),
    }
)
"""The rows of weights and biases; of all others, the hidden size."""
_COLUMNS: Mapping[str, Callable[[Fields], int]] = MappingProxyType(
    {
        "self_attn.o_proj": lambda config: _heads(config, _QUERIES),
        "self_attn.out_proj": lambda config: _heads(config, _QUERIES),
        "down_proj": lambda config: _width(config, "intermediate_size"),
        "w2": lambda config: _width(config, "intermediate_size"),
        "conv.conv": lambda config: _width(config, "conv_L_cache"),
        "mamba.out_proj": lambda config: _width(config, "mamba_d_ssm"),
        "mamba.conv1d": lambda config: _width(config, "mamba_d_conv"),
    }
)
"""The columns of weights; of all others, the hidden size."""
_NUMBERS: Mapping[str, Callable[[Fields], int]] = MappingProxyType(
    {
        "q_norm": lambda config: _width(config, "head_dim"),
        "k_norm": lambda config: _width(config, "head_dim"),
        "q_layernorm": lambda config: _width(config, "head_dim"),
        "k_layernorm": lambda config: _width(config, "head_dim"),
        "mamba.norm": lambda config: _width(config, "mamba_d_ssm"),
        "A_log": lambda config: _width(config, "mamba_n_heads"),
        "mamba.D": lambda config: _width(config, "mamba_n_heads"),
        "dt_bias": lambda config: _width(config, "mamba_n_heads"),
    }
)
"""The numbers of norms and of a state's parameters; of other norms, the hidden size."""


def shape_fault(name: str, shape: Shape, config: Fields) -> str:
    """Return the shape that a tensor must have, by its name in transformers; "" if it has it."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    if (numbers := _size_of(_NUMBERS, module)) is not None or module.endswith("norm"):
        wanted = config["hidden_size"] if numbers is None else numbers(config)
        return "" if math.prod(shape) == wanted else f"{wanted} numbers"
    rows, columns = _size_of(_ROWS, module), _size_of(_COLUMNS, module)
    out = config["hidden_size"] if rows is None else rows(config)
    if name.endswith(".bias"):
        return "" if shape == (out,) else f"{out} numbers"
    width = config["hidden_size"] if columns is None else columns(config)
    return "" if shape == (out, width) else f"the sizes {[out, width]}"


def _size_of(
    table: Mapping[str, Callable[[Fields], int]], module: str
) -> Callable[[Fields], int] | None:
    return next((size for end, size in table.items() if f".{module}".endswith(f".{end}")), None)
