"""A GGUF file of the Llama architecture as a transformers directory.

GGUF stores its own tensor names, packs weights in small quantised groups, and
permutes the rows of q and k for its own rotary embedding; all three are undone.
transformers can load such a file too, but parses it several times over (20 s
against 4 s) and needs accelerate for it.
"""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, TokenizersBackend
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
from transformers.integrations.gguf.reader import (
    GgufHeader,
    load_gguf_state_dict,
    read_gguf_metadata,
)

from kvell.models.progress import Progress

CONFIG_FIELDS = {
    "num_hidden_layers": "llama.block_count",
    "max_position_embeddings": "llama.context_length",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "rope_theta": "llama.rope.freq_base",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "vocab_size": "llama.vocab_size",
    "head_dim": "llama.rope.dimension_count",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "unk_token_id": "tokenizer.ggml.unknown_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}

MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write config, float32 safetensors and tokenizer of a GGUF file into a new directory."""
    progress("reading the packaged model", 0.0)
    header = GgufHeader.from_file(str(source))
    config = read_gguf_config(source)
    state: dict[str, torch.Tensor] = {}
    lazy = load_gguf_state_dict(header)
    for index, (name, tensor) in enumerate(lazy.items()):
        state[transformers_name(name)] = _unpack(name, tensor, config)
        progress("unpacking weights", 0.05 + 0.6 * index / len(lazy))
    progress("writing weights", 0.7)
    write_model(target, config, state)
    progress("writing the tokenizer", 0.9)
    tokenizer = TokenizersBackend.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True
    )
    tokenizer.save_pretrained(target)
    progress("done", 1.0)


def read_gguf_config(source: Path) -> Any:
    """The transformers config that the file's metadata describes."""
    metadata, tensor_names = read_gguf_metadata(str(source))
    fields = {name: metadata[key] for name, key in CONFIG_FIELDS.items()}
    tied = "output.weight" not in tensor_names
    return LlamaConfig(
        **fields,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
        dtype=torch.float32,
    )


def transformers_name(gguf_name: str) -> str:
    """transformers' name of a tensor.

    :raises KeyError: for a tensor that Llama does not have.
    """
    if layer := LAYER_NAME.fullmatch(gguf_name):
        return f"model.layers.{layer[1]}.{LAYER_TENSORS[layer[2]]}.weight"
    return f"{MODEL_TENSORS[gguf_name.removesuffix('.weight')]}.weight"


def restore_rotary_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's row order of q and k: pairs side by side become halves of a head."""
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, half, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def write_model(target: Path, config: Any, state: dict[str, torch.Tensor]) -> None:
    """Write ``config.json``, ``generation_config.json`` and one safetensors file."""
    target.mkdir(parents=True)
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _unpack(name: str, tensor: Any, config: Any) -> torch.Tensor:
    raw: torch.Tensor = tensor[...]
    if tensor.ggml_type not in GGML_BLOCK:
        return raw.to(torch.float32)
    group_elements, group_bytes = GGML_BLOCK[tensor.ggml_type]
    columns = tensor.shape[-1] // group_bytes * group_elements
    weight: torch.Tensor = dequantize(raw, tensor.ggml_type).reshape(-1, columns)
    if ".attn_q." in name:
        return restore_rotary_rows(weight, config.num_attention_heads)
    if ".attn_k." in name:
        return restore_rotary_rows(weight, config.num_key_value_heads)
    return weight
