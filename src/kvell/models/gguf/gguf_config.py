"""transformers' config of a GGUF file, from its metadata and the shapes of its tensors.

A field that the file leaves out has the value that llama.cpp takes for it. Where the file keeps
numbers of a config in its tensors instead (multipliers that are folded into weights, factors of a
rotation), they are read from there.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import FETCH_AGAIN
from kvell.models.gguf.gguf_file import GgufFile

Fields = dict[str, Any]
Factors = Callable[[str], npt.NDArray[np.float32]]
"""Reads a tensor of the file by its name."""

MOST_LAYERS = 1 << 12
USE_SAFETENSORS = "use the model's safetensors"
LLAMA3_ROPE = (1.0, 4.0, 8192)
"""The low and high frequency factors and the first context of all published Llama 3 models."""
ROPE_ERROR = 1e-3
GEMMA2_27B, GEMMA3_27B = 46, 62
"""Numbers of layers of the models whose scores are scaled by hidden size / heads."""
GEMMA3_PERIOD = 6
"""Gemma 3 has a full layer after each five with a window, and SmolLM3 none that rotates each 4."""
SMOLLM3_PERIOD = 4


class Metadata:
    """A file's metadata: keys of its architecture, each of the type that it must have."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._prefix = architecture

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number; one that is given for each layer is the same for all.

        :raises ChangeSomething: if it is missing or of another type.
        """
        value = self.file.metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.fault(key, value)
        return value

    def layers(self) -> int:
        """Return the number of layers.

        :raises ChangeSomething: if it is missing, or more than any model has.
        """
        count = self.size("block_count")
        if count > MOST_LAYERS:
            raise self.fault("block_count", count)
        return count

    def sizes(self, key: str) -> list[int]:
        """Return a number for each layer.

        :raises ChangeSomething: if it is missing or of another type.
        """
        count = self.layers()
        value = self.file.metadata.get(f"{self._prefix}.{key}")
        numbers = [value] * count if type(value) is int else value
        if not isinstance(numbers, list) or len(numbers) != count:
            raise self.fault(key, value)
        return [int(number) for number in numbers]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number.

        :raises ChangeSomething: if it is missing or of another type.
        """
        value = self.file.metadata.get(f"{self._prefix}.{key}", default)
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise self.fault(key, value)
        return float(value)  # type: ignore[arg-type]

    def word(self, key: str) -> str:
        return str(self.file.metadata.get(f"{self._prefix}.{key}", ""))

    def gives(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self.file.metadata

    def fault(self, key: str, value: object) -> ChangeSomething:
        name = f"{self._prefix}.{key}"
        problem = f"lacks {name}" if value is None else f"has the value {str(value)[:80]} of {name}"
        return ChangeSomething("model", self.file.files[0], problem, FETCH_AGAIN)


def config_of(file: GgufFile, read: Factors) -> Fields:
    """Return the fields of config.json.

    :param read: reads a tensor of the file.
    :raises ChangeSomething: if the architecture is not read, or a key is missing or malformed.
    """
    architecture = str(file.metadata.get("general.architecture", ""))
    family = FAMILIES.get(architecture)
    if family is None:
        problem = f"has the architecture {architecture[:80]!r}, which is not read from GGUF"
        remedy = f"{USE_SAFETENSORS}; GGUF is read of {', '.join(sorted(FAMILIES))}"
        raise ChangeSomething("model", file.files[0], problem, remedy)
    metadata = Metadata(file, architecture)
    return _common(metadata, read) | family(metadata, read)


def _common(metadata: Metadata, read: Factors) -> Fields:
    file = metadata.file
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        problem = "has no matrix token_embd.weight"
        raise ChangeSomething("model", file.files[0], problem, FETCH_AGAIN)
    head_size = metadata.size("attention.key_length", max(1, hidden // heads))
    if metadata.size("attention.value_length", head_size) != head_size:
        raise metadata.fault("attention.value_length", metadata.size("attention.value_length"))
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": "bfloat16",
        "head_dim": head_size,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.size("feed_forward_length"),
        "max_position_embeddings": metadata.size("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": metadata.layers(),
        "num_key_value_heads": max(
            metadata.sizes("attention.head_count_kv")
            if metadata.gives("attention.head_count_kv")
            else [heads]
        ),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(metadata, read, head_size),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": embedding.shape[0],
        **{
            f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }


def _rope(metadata: Metadata, read: Factors, head_size: int) -> Fields:
    made: Fields = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 1e4)}
    rotated = metadata.size("rope.dimension_count", head_size)
    if rotated != head_size:
        made["partial_rotary_factor"] = rotated / head_size
    kind = metadata.word("rope.scaling.type") or "none"
    if "rope_factors_long.weight" in metadata.file.tensors:
        return made | _long_rope(metadata, read)
    if "rope_freqs.weight" in metadata.file.tensors:
        return made | _llama3_rope(metadata, read("rope_freqs.weight"), made["rope_theta"])
    if kind == "linear":
        made |= {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    elif kind == "yarn":
        made |= {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.size(
                "rope.scaling.original_context_length"
            ),
        }
    elif kind != "none":
        raise metadata.fault("rope.scaling.type", kind)
    return made


def _llama3_rope(metadata: Metadata, said: npt.NDArray[np.float32], theta: float) -> Fields:
    """Return the scaling whose factors a file has for each frequency.

    :raises ChangeSomething: if no Llama 3 scaling has them.
    """
    low, high, context = LLAMA3_ROPE
    factor = float(said.max(initial=1.0))
    lengths = 2 * math.pi * theta ** (np.arange(said.size) / said.size)
    part = ((context / lengths - low) / (high - low)).clip(0, 1)
    wanted = 1 / ((1 - part) / factor + part)
    if not np.allclose(said, wanted, rtol=ROPE_ERROR):
        problem = "has factors of its rotation that are not those of Llama 3"
        raise ChangeSomething("model", metadata.file.files[0], problem, USE_SAFETENSORS)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _long_rope(metadata: Metadata, read: Factors) -> Fields:
    made = {
        "rope_type": "longrope",
        "long_factor": read("rope_factors_long.weight").tolist(),
        "short_factor": read("rope_factors_short.weight").tolist(),
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length"),
    }
    if metadata.gives("rope.scaling.attn_factor"):
        made["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return made


def _llama(metadata: Metadata, _: Factors) -> Fields:
    """Return the fields of Llama, or of Mistral, whose files name the same architecture."""
    if metadata.gives("attention.sliding_window"):
        window = metadata.size("attention.sliding_window")
        return {**_family("mistral", "MistralForCausalLM"), "sliding_window": window}
    has_bias = "blk.0.ffn_down.bias" in metadata.file.tensors
    return _family("llama", "LlamaForCausalLM") | {"mlp_bias": has_bias}


def _qwen2(metadata: Metadata, _: Factors) -> Fields:
    return _family("qwen2", "Qwen2ForCausalLM") | _without_window(metadata)


def _qwen3(metadata: Metadata, _: Factors) -> Fields:
    return _family("qwen3", "Qwen3ForCausalLM") | _without_window(metadata)


def _smollm3(metadata: Metadata, _: Factors) -> Fields:
    count = metadata.layers()
    rotates = [int((index + 1) % SMOLLM3_PERIOD != 0) for index in range(count)]
    own = {"no_rope_layers": rotates, "no_rope_layer_interval": SMOLLM3_PERIOD, "mlp_bias": False}
    return _family("smollm3", "SmolLM3ForCausalLM") | _without_window(metadata) | own


def _phi3(metadata: Metadata, _: Factors) -> Fields:
    made = _family("phi3", "Phi3ForCausalLM")
    if metadata.gives("rope.scaling.original_context_length"):
        first = metadata.size("rope.scaling.original_context_length")
        made["original_max_position_embeddings"] = first
    window = metadata.file.metadata.get("phi3.attention.sliding_window")
    return made | {"sliding_window": window or None}


def _granite(metadata: Metadata, _: Factors) -> Fields:
    head_size = metadata.size("embedding_length") // metadata.size("attention.head_count")
    return _family("granite", "GraniteForCausalLM") | {
        "attention_multiplier": metadata.number("attention.scale", head_size**-0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
        "mlp_bias": False,
        "residual_multiplier": metadata.number("residual_scale", 1.0),
    }


def _gemma(metadata: Metadata, _: Factors) -> Fields:
    made = _family("gemma", "GemmaForCausalLM") | {"hidden_act": "gelu_pytorch_tanh"}
    return made | {"use_bidirectional_attention": None}


def _gemma2(metadata: Metadata, _: Factors) -> Fields:
    count = metadata.layers()
    return _family("gemma2", "Gemma2ForCausalLM") | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _layer_types(count, 2),
        "query_pre_attn_scalar": _score_size(metadata, GEMMA2_27B),
        "sliding_window": metadata.size("attention.sliding_window", 4096),
        "use_bidirectional_attention": None,
    }


def _gemma3(metadata: Metadata, read: Factors) -> Fields:
    count = metadata.layers()
    head_size = metadata.size("attention.key_length", 256)
    local = metadata.number("rope.freq_base_swa", 1e4)
    full = _rope(metadata, read, head_size)
    if not metadata.gives("rope.freq_base"):
        full["rope_theta"] = 1e6
    return _family("gemma3_text", "Gemma3ForCausalLM") | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _layer_types(count, GEMMA3_PERIOD),
        "query_pre_attn_scalar": _score_size(metadata, GEMMA3_27B),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "sliding_window": metadata.size("attention.sliding_window"),
        "use_bidirectional_attention": False,
    }


def _lfm2(metadata: Metadata, _: Factors) -> Fields:
    kinds = metadata.sizes("attention.head_count_kv")
    return _family("lfm2", "Lfm2ForCausalLM") | {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.size("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.in_proj.bias" in metadata.file.tensors,
        "layer_types": ["full_attention" if heads else "conv" for heads in kinds],
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _falcon_h1(metadata: Metadata, _: Factors) -> Fields:
    """Return the fields of Falcon-H1, whose multipliers are all folded into the weights."""
    inner, heads = metadata.size("ssm.inner_size"), metadata.size("ssm.time_step_rank")
    return _family("falcon_h1", "FalconH1ForCausalLM") | {
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in metadata.file.tensors,
        "mamba_d_conv": metadata.size("ssm.conv_kernel"),
        "mamba_d_head": max(1, inner // heads),
        "mamba_d_ssm": inner,
        "mamba_d_state": metadata.size("ssm.state_size"),
        "mamba_n_groups": metadata.size("ssm.group_count", 1),
        "mamba_n_heads": heads,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in metadata.file.tensors,
        "mlp_bias": False,
        "mlp_multipliers": [1.0, 1.0],
        "projectors_bias": False,
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "ssm_out_multiplier": 1.0,
    }


def _family(model_type: str, architecture: str) -> Fields:
    return {"architectures": [architecture], "model_type": model_type}


def _without_window(metadata: Metadata) -> Fields:
    types = ["full_attention"] * metadata.layers()
    return {"layer_types": types, "sliding_window": None, "use_sliding_window": False}


def _layer_types(count: int, period: int) -> list[str]:
    """Return the types of layers of which each ``period``-th is full, and others have a window."""
    return [
        "sliding_attention" if (index + 1) % period else "full_attention" for index in range(count)
    ]


def _score_size(metadata: Metadata, largest: int) -> int:
    """Return the size whose inverse square root scales scores.

    :param largest: layers of the family's model that does not take the size of its heads.
    """
    heads = metadata.size("attention.head_count")
    if metadata.layers() == largest:
        return metadata.size("embedding_length") // heads
    return metadata.size("attention.key_length", 256)


FAMILIES: Mapping[str, Callable[[Metadata, Factors], Fields]] = MappingProxyType(
    {
        "falcon-h1": _falcon_h1,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "granite": _granite,
        "lfm2": _lfm2,
        "llama": _llama,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "smollm3": _smollm3,
    }
)
"""Each architecture of GGUF that is read, and the fields that are its own."""
