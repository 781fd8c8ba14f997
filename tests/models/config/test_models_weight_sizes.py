"""Bytes of weights from a config alone, against modules with weights and public figures."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvell.errors import ChangeSomething
from kvell.models.config.activations import activation_model
from kvell.models.config.configs import config_from_dict, read_config
from kvell.models.config.description import describe
from kvell.models.families.families import FUSED
from kvell.models.families.plain_config import plain_config, sizes_config
from kvell.models.families.weight_sizes import weights_bytes
from tests.models.cases import families, some_fast
from tests.models.harness import FAMILIES, SMALL, tiny_config

CONFIGS = Path(__file__).parents[3] / "bench" / "configs"
BILLIONS = {
    "deepseek-v2-lite": 15.7,
    "falcon-h1-7b": 7.59,
    "gemma2-9b": 9.24,
    "gemma3-27b": 27.0,
    "gpt-oss-20b": 20.9,
    "jamba-mini": 51.6,
    "kimi-linear-48b": 49.1,
    "lfm2-1.2b": 1.17,
    "llama-3.2-11b-vision": 10.7,
    "llama3-8b": 8.03,
    "llava-onevision-7b": 8.0,
    "ministral-8b": 8.02,
    "nemotron-h-8b": 8.1,
    "paligemma2-10b": 9.7,
    "qwen2.5-vl-7b": 8.29,
    "qwen3-8b": 8.19,
    "qwen3-next": 79.7,
}
"""Parameters that their makers publish, of those that state them for what our config says."""


def built(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a module with weights; a tensor that two names share counts once."""
    module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    return sum({t.data_ptr(): t.nbytes for t in module.state_dict().values()}.values())


@pytest.mark.parametrize("name", families(FAMILIES))
def test_every_family_takes_what_its_weights_take(name: str) -> None:
    config = tiny_config(name)
    assert weights_bytes(config, 2) == built(config, torch.bfloat16)


@pytest.mark.parametrize("name", [name for name, family in FUSED.items() if not family.mixer])
def test_plain_configs_need_no_module(name: str, tmp_path: Path) -> None:
    config = tiny_config(name)
    config.save_pretrained(tmp_path)
    plain = plain_config(tmp_path)
    assert plain is not None
    assert weights_bytes(plain, 2) == built(config, torch.bfloat16)


SIZED = ("llama3-8b", "large/llama3-70b", "ministral-8b", "gemma2-9b", "gemma3-27b")


@pytest.mark.parametrize("name", SIZED)
def test_omitted_fields_have_the_defaults_of_transformers(name: str) -> None:
    path = CONFIGS / f"{name}.json"
    sized, whole = sizes_config(path), read_config(path)
    assert isinstance(sized, SimpleNamespace)
    assert describe(sized, 2) == describe(whole, 2)
    assert weights_bytes(sized, 2) == weights_bytes(whole, 2)
    needs = [activation_model(config).need_bytes(2048, 256) for config in (sized, whole)]
    assert needs[0] == needs[1]


def test_a_rotation_that_changes_lengths_is_left_to_transformers(tmp_path: Path) -> None:
    raw = json.loads((CONFIGS / "llama3-8b.json").read_text())
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_scaling": scaling}))
    assert not isinstance(sizes_config(tmp_path), SimpleNamespace)


@pytest.mark.parametrize("change", [{"rope_scaling": [1]}, {"hidden_size": "wide"}])
def test_a_malformed_config_is_one_clear_error(tmp_path: Path, change: dict[str, Any]) -> None:
    raw = json.loads((CONFIGS / "llama3-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ChangeSomething, match="its config is malformed"):
        sizes_config(tmp_path)


def test_float32_weights_are_twice_as_many_bytes() -> None:
    config = tiny_config("LlamaForCausalLM")
    assert weights_bytes(config, 4) == built(config, torch.float32)
    assert weights_bytes(config, 4) == 2 * built(config, torch.bfloat16)


def test_tied_embeddings_count_once() -> None:
    tied = weights_bytes(tiny_config("LlamaForCausalLM", tie_word_embeddings=True), 2)
    untied = weights_bytes(tiny_config("LlamaForCausalLM", tie_word_embeddings=False), 2)
    assert tied is not None and untied is not None
    assert untied - tied == 2 * SMALL["vocab_size"] * SMALL["hidden_size"]


def test_the_config_is_left_as_it_was() -> None:
    config = read_config(CONFIGS / "deepseek-v2-lite.json")
    before = config.to_dict()
    weights_bytes(config, 2)
    assert config.to_dict() == before


def test_llama3_8b_by_hand() -> None:
    """Embedding and head; queries, outputs, keys, values, three matrices, two norms a layer."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    numbers = 2 * 128256 * 4096 + 32 * layer + 4096
    assert numbers == 8_030_261_248
    assert weights_bytes(read_config(CONFIGS / "llama3-8b.json"), 2) == 2 * numbers


@pytest.mark.parametrize("name", some_fast(sorted(BILLIONS), sorted(BILLIONS)[::4]))
def test_bench_shapes_have_as_many_parameters_as_published(name: str) -> None:
    size_bytes = weights_bytes(read_config(CONFIGS / f"{name}.json"), 2)
    assert size_bytes is not None
    assert size_bytes / 2e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_an_encoder_counts_too() -> None:
    """A vision tower of 400 million parameters stands before Qwen 2's 7.6 billion."""
    whole = read_config(CONFIGS / "llava-onevision-7b.json")
    text = config_from_dict(whole.text_config.to_dict())
    assert text.model_type == "qwen2"
    both, alone = weights_bytes(whole, 2), weights_bytes(text, 2)
    assert both is not None and alone is not None
    assert 0.7e9 < both - alone < 1.0e9


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(model_type="frobnicator"),
        tiny_config("LlamaForCausalLM", hidden_act="no such function"),
    ],
    ids=["no class", "cannot be built"],
)
def test_nobody_knows(config: Any) -> None:
    assert weights_bytes(config, 2) is None
