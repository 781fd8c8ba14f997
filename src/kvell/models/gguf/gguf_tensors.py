"""The tensors of a GGUF file by transformers' names, and the types that are read."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import FETCH_AGAIN
from kvell.models.config.stored_tensors import StoredTensor
from kvell.models.gguf.gguf_config import USE_SAFETENSORS, Fields, config_of
from kvell.models.gguf.gguf_file import GgufFile, GgufTensor
from kvell.models.gguf.gguf_shapes import shape_fault

Bytes = npt.NDArray[np.uint8]

FLOATS = ("F32", "F16", "BF16")
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
"""Types that are groups of 32 numbers with a scale and a minimum."""
EIGHT_BITS = ("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""Types that are nearest to groups of 32 numbers of 8 bits with a scale."""
ERRORS_PERCENT = MappingProxyType({"Q4_0": 0, "Q4_1": 0, "Q8_0": 0, "Q4_K": 0.03})
LARGEST_ERROR_PERCENT = 0.5
"""The error of a type in its form, of the numbers' root mean square; of other types."""
INT4_BYTES = 20 / 32
"""Bytes of a number in groups of 32 with a scale and a minimum."""
INT8_BYTES = 34 / 32
"""Bytes of a number in groups of 32 with a scale."""
_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "falcon-h1": {
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
        "gemma2": _SANDWICH,
        "gemma3": _SANDWICH,
        "lfm2": {
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        "phi3": {"ffn_up": "mlp.gate_up_proj"},
    }
)
_WHOLE_NAMES = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
"""Tensors whose names do not end in ``weight`` or ``bias`` in transformers."""
_IN_CONFIG = re.compile(
    r"(blk\.\d+\.)?(rope_freqs|rope_factors_(long|short)|attn_rot_embd)\.weight"
)
_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")


def tensors_of(header: GgufFile, config: Fields) -> Mapping[str, GgufTensor]:
    """Return a file's tensors by transformers' names, each of a type and shape that is read.

    :param config: the fields of its config, which decide the shapes.
    :raises ChangeSomething: naming a tensor that is not.
    """
    architecture = str(header.metadata["general.architecture"])
    tensors: dict[str, GgufTensor] = {}
    for tensor in header.tensors.values():
        if _IN_CONFIG.fullmatch(tensor.name):
            continue
        name = _name(tensor, architecture)
        _check(name, tensor, config)
        tensors[name] = tensor
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    if layers != {str(index) for index in range(config["num_hidden_layers"])}:
        problem = f"has tensors of {len(layers)} layers instead of {config['num_hidden_layers']}"
        raise ChangeSomething("model", header.files[0], problem, FETCH_AGAIN)
    return tensors


def types_line(tensors: Mapping[str, StoredTensor], form: str) -> str:
    """Return a line for users about the blocks of a file and the form that they are read into."""
    types = sorted({tensor.dtype for tensor in tensors.values() if tensor.dtype not in FLOATS})
    if not types:
        return ""
    percent = max(ERRORS_PERCENT.get(name, LARGEST_ERROR_PERCENT) for name in types)
    return f"GGUF's {', '.join(types)}; read into {form}, with an error of {percent} %"


def memory_bytes(tensors: Mapping[str, GgufTensor], element_bytes: int) -> int:
    """Return the bytes of a file's weights in the forms of the compiled pass.

    :param element_bytes: bytes of a number that is not in blocks, or of an embedding alone.
    """
    alone = "model.embed_tokens.weight" if "lm_head.weight" in tensors else ""
    sizes = {**dict.fromkeys(FOUR_BITS, INT4_BYTES), **dict.fromkeys(EIGHT_BITS, INT8_BYTES)}
    return sum(
        int(
            math.prod(tensor.shape)
            * sizes.get(tensor.dtype if name != alone else "", element_bytes)
        )
        for name, tensor in tensors.items()
    )


def config_from(header: GgufFile) -> Fields:
    """Return the fields of a file's config.

    :raises ChangeSomething: if a key is missing or malformed, or the architecture is not read.
    """

    def read(name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        tensor = header.tensors.get(name)
        if tensor is None or tensor.dtype != "F32" or len(tensor.shape) != 1:
            raise ChangeSomething("model", header.files[0], f"lacks {name} of F32", FETCH_AGAIN)
        return map_file(tensor.file)[tensor.start : tensor.stop].view(np.float32)

    return config_of(header, read)


def _name(tensor: GgufTensor, architecture: str) -> str:
    """Return a tensor's name in transformers.

    :raises ChangeSomething: if models of its architecture have none of this name.
    """
    prefix = ""
    own = tensor.name
    names = _OUTER_NAMES
    if match := _LAYER.fullmatch(tensor.name):
        prefix = f"model.layers.{match[1]}."
        own = match[2]
        names = _NAMES | dict(_OWN_NAMES.get(architecture, {}))
        if own in _WHOLE_NAMES:
            return prefix + _WHOLE_NAMES[own]
    elif architecture == "falcon-h1":
        names = names | {"output_norm": "model.final_layernorm"}
    stem, _, kind = (own if own not in names else f"{own}.weight").rpartition(".")
    if kind in ("weight", "bias") and stem in names:
        return f"{prefix}{names[stem]}.{kind}"
    problem = f"has the tensor {tensor.name!r}, which is not read of {architecture}"
    raise ChangeSomething("model", tensor.file, problem, USE_SAFETENSORS)


def _check(name: str, tensor: GgufTensor, config: Fields) -> None:
    """Refuse a type that is not read, and a shape that the metadata do not say.

    :raises ChangeSomething: naming the tensor.
    """
    if wanted := shape_fault(name, tensor.shape, config):
        problem = f"its tensor {tensor.name!r} has the sizes {list(tensor.shape)}, not {wanted}"
        raise ChangeSomething("model", tensor.file, problem, FETCH_AGAIN)
    blocks = (*FOUR_BITS, *EIGHT_BITS)
    if tensor.dtype in FLOATS or (tensor.dtype in blocks and len(tensor.shape) == 2):
        return
    problem = f"has the tensor {tensor.name!r} of type {tensor.dtype}, which is not read"
    remedy = f"use a file whose types are among {', '.join(sorted((*blocks, *FLOATS)))}"
    raise ChangeSomething("model", tensor.file, problem, remedy)


def map_file(file: Path) -> Bytes:
    """Map a file; pages that are written to, which nothing does, would be this process's own."""
    return np.asarray(np.memmap(file, np.uint8, "c"))
