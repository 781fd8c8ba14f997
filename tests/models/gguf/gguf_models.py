"""GGUF files of random models, written by the library ``gguf`` as llama.cpp's converter does."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvell.models.loading.random_weights import random_module
from tests.models.harness import FULL, SLIDING, tiny_config

Bytes = npt.NDArray[np.uint8]
Matrix = npt.NDArray[np.float32]

LARGER: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
}
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "falcon-h1": (
        "FalconH1ForCausalLM",
        {"mamba_norm_before_gate": False, "mamba_d_ssm": 256, "mamba_d_head": 64},
    ),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"layer_types": [SLIDING, FULL, SLIDING], "query_pre_attn_scalar": 64},
    ),
    "gemma3": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 64}),
    "granite": ("GraniteForCausalLM", {"residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "lfm2": ("Lfm2ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": False, "sliding_window": None, "layer_types": [FULL] * 3},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4}),
}
"""Families that are read, by GGUF's name, with a config whose sizes suit blocks of 256."""
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}
"""Offsets of the half-precision numbers in a block; 0 for other types."""
TIED = ("gemma", "gemma2")
"""Families whose files have no head of their own."""
PERMUTED = ("granite", "llama", "mistral", "smollm3")


def type_of(kind: str) -> Any:
    return gguf.GGMLQuantizationType[kind]


def random_rows(kind: str, out: int, width: int, seed: int) -> Bytes:
    """Random blocks whose numbers have a root mean square of about 0.06."""
    numbers, size_bytes = gguf.GGML_QUANT_SIZES[type_of(kind)]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (out * width // numbers, size_bytes), dtype=np.uint8)
    if kind == "Q8_0":  # no quantiser writes -128
        blocks[blocks == 128] = 129
    halves = HALVES.get(kind, (0,))
    minimum = 16.0 if kind.endswith("_K") else -7.5 if kind == "Q4_1" else -16.0
    for offset, unit in zip(halves, (1.0, minimum), strict=False):
        blocks[:, offset : offset + 2] = _halves(np.full(len(blocks), 1e-3 * unit))
    scale = 0.06 / float(np.sqrt((gguf.dequantize(blocks, type_of(kind)) ** 2).mean()))
    for offset in halves:
        said = blocks[:, offset : offset + 2].copy().view(np.float16).astype(np.float32)
        drawn = generator.uniform(0.7, 1.3, said.shape)
        blocks[:, offset : offset + 2] = _halves(said * scale * drawn)
    return blocks.reshape(out, -1)


def _halves(values: npt.NDArray[Any]) -> Bytes:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def stored(values: torch.Tensor, kind: str, seed: int) -> tuple[Bytes | Matrix, Matrix]:
    """A tensor as a file has it, and its numbers; a matrix in blocks is drawn anew."""
    plain = values.detach().float().numpy()
    if kind in ("F32", "F16", "BF16"):
        data = gguf.quantize(plain, type_of(kind))
    else:
        data = random_rows(kind, plain.shape[0], plain.shape[1], seed)
    return data, gguf.dequantize(data, type_of(kind)).reshape(plain.shape)


MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "rl d")
ENDS = ("<|end_of_text|>", "<|eot_id|>")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def add_vocabulary(writer: Any, rules: str) -> None:
    """Add a byte-level vocabulary of the alphabet, the merges, and three special tokens."""
    alphabet = sorted(bytes_to_unicode().values())
    merged = [merge.replace(" ", "") for merge in MERGES]
    special = ["<|begin_of_text|>", *ENDS]
    tokens = [*special, *alphabet, *merged]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rules)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)


class Writer:
    """Writes a module into a file; the module then has the numbers of the file."""

    def __init__(self, family: str, module: Any, kinds: Callable[[str], str]) -> None:
        self._family, self._module, self._kinds = family, module, kinds
        self._name = "llama" if family == "mistral" else family
        architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == self._name)
        count = module.config.num_hidden_layers
        self._names = gguf.get_tensor_name_map(architecture, count)

    def write(self, path: Path, parts_of: int = 0, rules: str = "") -> None:
        """Write it.

        :param parts_of: a split file's parts have at most so many tensors.
        :param rules: how its vocabulary splits text; a file without one has no vocabulary.
        """
        writer = gguf.GGUFWriter(path, self._name, split_max_tensors=parts_of)
        self._write_metadata(writer)
        if rules:
            add_vocabulary(writer, rules)
        for index, (name, parameter) in enumerate(self._module.named_parameters()):
            self._write_tensor(writer, name, parameter, index)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def name_of(self, name: str) -> str:
        """The file's name of a parameter, by the library's own map."""
        if "." not in name:  # not the model's own
            return f"{name}.weight"
        own = {"dt_bias": "dt_proj.bias"}.get(name.rpartition(".")[2])
        if own is not None:
            name = f"{name.rpartition('.')[0]}.{own}"
        made = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert made is not None, name
        return str(made)

    def _write_tensor(self, writer: Any, name: str, parameter: torch.Tensor, index: int) -> None:
        is_matrix = parameter.ndim == 2
        kind = self._kinds(self.name_of(name)) if is_matrix else "F32"
        rows = self._order(name, parameter)
        data, numbers = stored(self._folded(name, parameter.data[rows]), kind, index)
        writer.add_tensor(self.name_of(name), np.asarray(data), raw_dtype=type_of(kind))
        back = torch.empty_like(parameter)
        back[rows] = self._unfolded(name, torch.from_numpy(numbers.copy())).view(parameter.shape)
        parameter.data = back

    def _order(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """For each row of the file, the row of the parameter, as llama.cpp's converter writes."""
        part = name.split(".")[-2] if "." in name else ""
        config = self._module.config
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        rows = torch.arange(parameter.shape[0])
        if self._family not in PERMUTED or part not in heads:
            return rows
        return rows.view(heads[part], 2, -1).transpose(1, 2).reshape(-1)

    def _folded(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if name.endswith("A_log"):
            return -values.exp()[:, None]
        if name.endswith("mamba.D"):
            return values[:, None]
        if "conv" in name and values.ndim == 3:
            return values[:, 0]
        if self._family.startswith("gemma") and name.endswith("norm.weight"):
            return values + 1
        return values

    def _unfolded(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if name.endswith("A_log"):
            return (-values).log()
        if self._family.startswith("gemma") and name.endswith("norm.weight"):
            return values - 1
        return values

    def _write_metadata(self, writer: Any) -> None:
        config = self._module.config
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        head_size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
        writer.add_vocab_size(config.vocab_size)
        eps = config.norm_eps if self._family == "lfm2" else config.rms_norm_eps
        writer.add_layer_norm_rms_eps(eps)
        ropes = config.rope_parameters
        writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
        writer.add_eos_token_id(1)
        own = getattr(self, f"_add_{self._family.replace('-', '_')}", None)
        if own is not None:
            own(writer, config)

    def _add_mistral(self, writer: Any, config: Any) -> None:
        writer.add_sliding_window(config.sliding_window)

    def _add_phi3(self, writer: Any, config: Any) -> None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)

    def _add_gemma2(self, writer: Any, config: Any) -> None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)

    def _add_gemma3(self, writer: Any, config: Any) -> None:
        writer.add_sliding_window(config.sliding_window)

    def _add_granite(self, writer: Any, config: Any) -> None:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)

    def _add_lfm2(self, writer: Any, config: Any) -> None:
        kinds = config.layer_types
        counts = [config.num_key_value_heads if kind == FULL else 0 for kind in kinds]
        del writer.kv_data[0]["lfm2.attention.head_count_kv"]
        writer.add_head_count_kv(counts)
        writer.add_shortconv_l_cache(config.conv_L_cache)

    def _add_falcon_h1(self, writer: Any, config: Any) -> None:
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_inner_size(config.mamba_d_ssm)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_group_count(config.mamba_n_groups)


def without_multipliers(config: Any) -> Any:
    """A config of Falcon-H1 whose multipliers are in its weights, as in its files."""
    for name in vars(config):
        if name.endswith("multiplier"):
            setattr(config, name, 1.0)
    config.mlp_multipliers, config.ssm_multipliers = [1.0, 1.0], [1.0] * 5
    return config


def family_module(family: str, scale: float | None = None, **changes: Any) -> Any:
    """A random module of a family, in float32; by default with a scale at which answers vary."""
    architecture, own = FAMILIES[family]
    config = tiny_config(architecture, **(LARGER | own | changes))
    if family == "falcon-h1":
        config = without_multipliers(config)
    module = random_module(config, 3, scale=scale)
    if family in TIED:
        module.lm_head.weight = module.model.embed_tokens.weight
        module.config.tie_word_embeddings = True
    module.set_attn_implementation("eager")
    return module


def llama3_factors(module: Any) -> Matrix:
    """Factors of the rotation as llama.cpp's converter writes them."""
    ropes = module.config.rope_parameters
    size = module.config.head_dim
    low = ropes["original_max_position_embeddings"] / ropes["low_freq_factor"]
    high = ropes["original_max_position_embeddings"] / ropes["high_freq_factor"]
    made = []
    for index in range(0, size, 2):
        length = 2 * math.pi * ropes["rope_theta"] ** (index / size)
        if length < high:
            made.append(1.0)
        elif length > low:
            made.append(ropes["factor"])
        else:
            part = ropes["original_max_position_embeddings"] / length - ropes["low_freq_factor"]
            part /= ropes["high_freq_factor"] - ropes["low_freq_factor"]
            made.append(1 / ((1 - part) / ropes["factor"] + part))
    return np.asarray(made, np.float32)
