"""Sizes that are read from configs without transformers, against what transformers reads."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvell.errors import ChangeSomething
from kvell.models.config.activations import activation_model
from kvell.models.config.configs import read_config
from kvell.models.config.description import describe
from kvell.models.config.json_files import overridden
from kvell.models.families.families import EXACT, FUSED, WITH_IMAGES, family_names
from kvell.models.families.plain_config import sizes_config
from kvell.models.families.plain_weights import LAYERS
from kvell.models.families.sized_families import SIZED
from kvell.models.families.sized_images import SIZED_IMAGES
from kvell.models.families.vision_weights import BESIDE_TEXT
from kvell.models.families.weight_sizes import weights_bytes
from tests.models.harness import tiny_config
from tests.models.pictures import GRIDS, GRIDS_2_5, picture_config

CONFIGS = Path(__file__).parents[3] / "bench" / "configs"
NAMES = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.json"))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "qwen2": [{"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}],
    "mistral": [{"sliding_window": None}, {"sliding_window": 9}],
    "qwen3_moe": [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}],
    "deepseek_v3": [{"q_lora_rank": None}, {"first_k_dense_replace": 2}, {"attention_bias": True}],
    "gpt_oss": [{"tie_word_embeddings": True}],
    "jamba": [{"expert_layer_offset": 0}, {"mamba_dt_rank": "auto"}],
    "lfm2": [{"block_auto_adjust_ff_dim": True}],
    "glm4_moe_lite": [{"mlp_layer_types": ["sparse", "dense", "sparse"]}],
    "granitemoehybrid": [
        {"num_local_experts": 0, "attention_bias": True, "mamba_conv_bias": False},
        {"layer_types": ["mamba", "attention", "attention"], "shared_intermediate_size": 16},
        {"layer_types": None, "mamba_d_head": "auto", "mamba_n_heads": 12},
    ],
    "internvl": [
        {"downsample_ratio": 0.25, "vision_config": {"num_channels": 1, "attention_bias": True}},
        {"vision_config": {"image_size": 24, "patch_size": [8, 4]}},
        {"vision_config": {"norm_type": "rms_norm", "use_qk_norm": True}},
    ],
    "minimax": [{"block_size": 8, "layer_types": None, "head_dim": 8, "num_local_experts": 3}],
    "nemotron_h": [{"layers_block_type": ["mamba", "attention", "mlp", "attention"]}],
    "olmo_hybrid": [
        {"attention_bias": True, "layer_types": ["linear_attention"] * 2 + ["full_attention"]},
        {"linear_num_key_heads": None, "linear_key_head_dim": None, "linear_value_head_dim": None},
        {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
    ],
    "zamba2": [
        {"num_mem_blocks": 2, "use_shared_attention_adapter": False, "adapter_rank": 4},
        {"num_mem_blocks": 3, "num_key_value_heads": 2},
        {
            "layers_block_type": ["mamba", "mamba", "hybrid", "hybrid", "hybrid"],
            "hybrid_layer_ids": [2, 3, 4],
        },
        {"layers_block_type": ["mamba"] * 5},
        {"mamba_expand": 4, "mamba_headdim": 32},
        {"head_dim": 8},
    ],
    "gemma3n_text": [
        {"num_kv_shared_layers": 0, "altup_num_inputs": 3, "layer_types": None},
        {"num_kv_shared_layers": 6},
        {"num_kv_shared_layers": 2, "intermediate_size": [32, 64, 32, 64, 32, 64]},
        {"hidden_size_per_layer_input": 4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    "gemma3_text": [
        {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    ],
    "kimi_linear": [
        {"q_lora_rank": 12, "attention_bias": True, "num_shared_experts": 2},
        {"layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 2},
        {
            "layer_types": None,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2],
                "head_dim": 8,
                "num_heads": 5,
                "short_conv_kernel_size": 3,
            },
        },
    ],
    "mllama": [
        {"text_config": {"tie_word_embeddings": True, "cross_attention_layers": [2]}},
        {"vision_config": {"supported_aspect_ratios": [[1, 1], [1, 2]]}},
        {"vision_config": {"num_global_layers": 3, "num_channels": 1}},
    ],
    "qwen2_5_vl": [
        {"text_config": {"use_sliding_window": True, "layer_types": None, "max_window_layers": 1}},
        {"text_config": {"tie_word_embeddings": True, "head_dim": 8}},
        {"vision_config": {"temporal_patch_size": 1, "in_channels": 1, "depth": 1}},
    ],
    "qwen2_vl": [{"vision_config": {"mlp_ratio": 3, "embed_dim": 16, "spatial_merge_size": 1}}],
    "llava_onevision": [
        {"text_config": {"tie_word_embeddings": True}, "vision_feature_layer": [-2, -1]},
        {"multimodal_projector_bias": False, "image_grid_pinpoints": None},
        {"vision_config": {"vision_use_head": False, "image_size": 28}},
    ],
    "paligemma": [
        {"projection_dim": 32, "text_config": {"tie_word_embeddings": False}},
        {"vision_config": {"vision_use_head": True, "num_channels": 1}},
    ],
    "llama4_text": [{"no_rope_layers": [0, 1, 1], "layer_types": None, "moe_layers": None}],
}


def compare(sized: Any, whole: Any) -> None:
    assert describe(sized, 2) == describe(whole, 2)
    assert weights_bytes(sized, 2) == weights_bytes(whole, 2)
    assert weights_bytes(sized, 4) == weights_bytes(whole, 4)
    needs = [activation_model(config).need_bytes(2048, 256) for config in (sized, whole)]
    assert needs[0] == needs[1]


@pytest.mark.parametrize("name", NAMES)
def test_named_shapes_need_no_transformers(name: str) -> None:
    path = CONFIGS / f"{name}.json"
    sized = sizes_config(path)
    assert isinstance(sized, SimpleNamespace)
    compare(sized, read_config(path))


def test_each_sized_family_is_exact_and_has_tensors() -> None:
    assert {family.architecture for family in SIZED.values()} <= EXACT
    beside_images = {
        name for images in SIZED_IMAGES.values() if images.text for name in images.texts
    }
    assert SIZED.keys() | beside_images == LAYERS.keys()


def test_each_sized_family_of_images_is_served_and_has_tensors() -> None:
    assert {images.architecture for images in SIZED_IMAGES.values()} <= WITH_IMAGES.keys()
    assert SIZED_IMAGES.keys() == BESIDE_TEXT.keys()


FAMILIES_WITH_TORCH = {"Gemma4"}
"""Families whose tensors are not listed: transformers makes the model without storage."""
ARCHITECTURES = sorted(
    {family.architecture for family in SIZED.values()}
    | {name for name, family in FUSED.items() if not family.mixer}
    | {images.architecture for images in SIZED_IMAGES.values()}
)


def test_every_other_family_is_planned_without_torch() -> None:
    sized = {name.partition("For")[0] for name in ARCHITECTURES}
    assert sized == set(family_names()) - FAMILIES_WITH_TORCH


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_has_the_sizes_of_transformers(architecture: str, tmp_path: Path) -> None:
    """As transformers writes the file, without what it adds, and with other values."""
    has_images = architecture in WITH_IMAGES
    config = picture_config(architecture) if has_images else tiny_config(architecture)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    assert isinstance(sizes_config(tmp_path), SimpleNamespace)
    for change in ({}, {"tie_word_embeddings": True}, *CHANGES.get(config.model_type, ())):
        file.write_text(json.dumps(overridden(raw, change)))
        compare(sizes_config(tmp_path), read_config(tmp_path))


@pytest.mark.parametrize("architecture", [GRIDS, GRIDS_2_5])
def test_published_files_have_the_fields_of_text_next_to_those_of_vision(
    architecture: str, tmp_path: Path
) -> None:
    picture_config(architecture).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    text = raw.pop("text_config")
    del text["model_type"], text["rope_parameters"]
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    for tied in (False, True):
        changed = {"rope_scaling": scaling, "tie_word_embeddings": tied}
        file.write_text(json.dumps(text | raw | changed))
        assert isinstance(sizes_config(tmp_path), SimpleNamespace)
        compare(sizes_config(tmp_path), read_config(tmp_path))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3"])
def test_rotations_that_stretch_a_context(architecture: str, kind: str, tmp_path: Path) -> None:
    tiny_config(architecture).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    theta = raw.pop("rope_parameters")["rope_theta"]
    scaling = YARN | {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for name in ("rope_type", "type"):
        given = {name if field == "rope_type" else field: v for field, v in scaling.items()}
        file.write_text(json.dumps(raw | {"rope_theta": theta, "rope_scaling": given}))
        compare(sizes_config(tmp_path), read_config(tmp_path))


@pytest.mark.parametrize("value", ["wide", {}, None])
def test_a_size_of_another_type_is_one_clear_error(value: object, tmp_path: Path) -> None:
    raw = json.loads((CONFIGS / "gemma3n-e4b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"intermediate_size": value}))
    with pytest.raises(ChangeSomething, match="its config is malformed"):
        weights_bytes(sizes_config(tmp_path), 2)


def test_code_of_a_repository_changes_nothing(tmp_path: Path) -> None:
    raw = json.loads((CONFIGS / "deepseek-v2-lite.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"auto_map": code}))
    assert isinstance(sizes_config(tmp_path), SimpleNamespace)
    compare(sizes_config(tmp_path), read_config(tmp_path))
