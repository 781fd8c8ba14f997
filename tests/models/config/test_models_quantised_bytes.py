"""Bytes of quantised checkpoints from their configs, by hand and by what their makers publish."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvell.errors import ChangeSomething
from kvell.models.config.configs import read_config
from kvell.models.families.plain_config import sizes_config
from kvell.models.families.quantised_bytes import METHODS, quantised_bytes, stored_form
from kvell.models.families.weight_sizes import weights_bytes
from kvell.vocabulary import GIB
from tests.models.harness import tiny_config

GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rope_scaling": {
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
    },
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def written(path: Path, raw: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize(
    ("raw", "gib", "unquantised_gib"),
    [(GPT_OSS_120B, 60.8, 217.6), (DEEPSEEK_V3, 626.9, 1249.8)],
    ids=["gpt-oss-120b", "deepseek-v3"],
)
def test_published_checkpoints_count_as_they_are_stored(
    tmp_path: Path, raw: dict[str, Any], gib: float, unquantised_gib: float
) -> None:
    """Files of gpt-oss-120b have 60.8 GiB; those of DeepSeek V3 another 14 of a draft layer."""
    config = sizes_config(written(tmp_path, raw))
    size_bytes = weights_bytes(config, 2)
    assert size_bytes is not None
    assert size_bytes / GIB == pytest.approx(gib, rel=0.002)
    assert size_bytes == weights_bytes(read_config(tmp_path), 2)
    plain = weights_bytes(sizes_config(written(tmp_path, raw | {"quantization_config": None})), 2)
    assert plain is not None and plain / GIB == pytest.approx(unquantised_gib, rel=0.002)


TENSORS = {
    "model.embed_tokens.weight": (100, 256),
    "model.norm.weight": (256,),
    "model.layers.0.self_attn.q_proj.weight": (512, 256),
    "model.layers.0.self_attn.q_proj.bias": (512,),
    "model.layers.0.mlp.gate.weight": (8, 256),
    "model.layers.0.mlp.experts.up_proj": (8, 128, 256),
    "model.layers.0.linear_attn.conv1d.weight": (96, 1, 4),
    "lm_head.weight": (100, 256),
}
KEPT = 2 * (100 * 256 + 256 + 512 + 8 * 256 + 96 * 4 + 100 * 256)
LINEAR, EXPERTS = 512 * 256, 8 * 128 * 256
BY_ROWS = LINEAR // 256 + EXPERTS // 256
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}


def group(**weights: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": {"weights": weights}}}


CASES: list[tuple[dict[str, Any], float]] = [
    ({"quant_method": "mxfp4"}, 2 * LINEAR + EXPERTS / 2 + EXPERTS / 32),
    ({"quant_method": "fp8"}, LINEAR + EXPERTS + 4 * (1 + 8)),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        LINEAR + EXPERTS + 4 * (LINEAR + EXPERTS) // 128**2,
    ),
    (
        {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]},
        2 * LINEAR + EXPERTS + 4 * 8,
    ),
    ({"quant_method": "fbgemm_fp8"}, LINEAR + EXPERTS + 4 * BY_ROWS),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        (LINEAR + EXPERTS) * (0.5 + 2.5 / 128),
    ),
    (
        {"quant_method": "gptq", "bits": 8, "group_size": 64},
        (LINEAR + EXPERTS) * (1 + 3 / 64) + 4 * 256 * (1 + 8),
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        (LINEAR + EXPERTS) / 2 + 2.5 * BY_ROWS + 4 * 256 * (1 + 8),
    ),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, LINEAR + EXPERTS + 4 * BY_ROWS),
    ({"load_in_8bit": True}, LINEAR + EXPERTS + 4 * BY_ROWS),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        (LINEAR + EXPERTS) * (0.5 + 4 / 64),
    ),
    (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["q_proj"],
        },
        2 * LINEAR + EXPERTS * (0.5 + (1 + 4 / 256) / 64),
    ),
    (group(num_bits=8, type="float", strategy="tensor"), LINEAR + EXPERTS + 2 * (1 + 8)),
    (group(num_bits=8, type="int", strategy="channel"), LINEAR + EXPERTS + 2 * BY_ROWS),
    (
        group(num_bits=4, type="int", strategy="group", group_size=64, symmetric=False),
        (LINEAR + EXPERTS) * (0.5 + 2.5 / 64),
    ),
    (
        group(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        (LINEAR + EXPERTS) * (0.5 + 1 / 16),
    ),
    (
        group(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        LINEAR + EXPERTS + 2 * (LINEAR + EXPERTS) // 128**2,
    ),
    (
        group(num_bits=8, strategy="channel") | {"ignore": ["re:.*self_attn.*", "lm_head"]},
        2 * LINEAR + EXPERTS + 2 * (EXPERTS // 256),
    ),
]


@pytest.mark.parametrize(("quantised", "size_bytes"), CASES)
def test_matrices_count_with_their_scales(quantised: dict[str, Any], size_bytes: float) -> None:
    made = quantised_bytes(TENSORS, quantised, 2)
    assert made is not None
    assert made - KEPT == pytest.approx(size_bytes, abs=16)


def test_every_method_has_a_case() -> None:
    assert {str(case.get("quant_method", "bitsandbytes")) for case, _ in CASES} == METHODS


@pytest.mark.parametrize("quantised", [{"quant_method": "quark"}, {"bits": 4}, COMPRESSED])
def test_an_unknown_quantiser_has_no_size(quantised: dict[str, Any], tmp_path: Path) -> None:
    assert stored_form(quantised) is None
    tiny_config("LlamaForCausalLM").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    written(tmp_path, raw | {"quantization_config": quantised})
    assert weights_bytes(sizes_config(tmp_path), 2) is None


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "fp8", "weight_block_size": ["a"]},
        {"quant_method": "awq", "bits": "four"},
        COMPRESSED | {"config_groups": [1]},
        {"quant_method": "fp8", "ignore": ["re:("]},
    ],
)
def test_a_malformed_quantiser_is_one_clear_error(quantised: dict[str, Any]) -> None:
    with pytest.raises(ChangeSomething, match=r"quantization_config.*malformed"):
        quantised_bytes(TENSORS, quantised, 2)
