"""Models of each family from a GGUF file, beside transformers with the file's own numbers."""

from pathlib import Path

import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.errors import ChangeSomething
from kvell.models.families.plain_config import known_config
from kvell.models.gguf.gguf_config import FAMILIES as READ
from kvell.models.loading.loading import load_paged_model
from kvell.models.paged_model import PagedModel
from kvell.models.sources.gguf_directory import gguf_directory
from tests.models.gguf.gguf_models import FAMILIES, Writer, family_module, llama3_factors
from tests.models.harness import assert_exact, oracle_logits, prompt_ids, runner_over


def plain(_: str) -> str:
    return "F32"


def loaded(file: Path, tmp_path: Path, dtype: torch.dtype = torch.float32) -> PagedModel:
    directory = gguf_directory(file, tmp_path / "cache")
    return load_paged_model(directory, choose_kernels(torch.device("cpu")), dtype)


def model_directory(tmp_path: Path) -> Path:
    [directory] = (tmp_path / "cache" / "gguf").iterdir()
    return directory


def logits_of(model: PagedModel, ids: list[int]) -> torch.Tensor:
    runner = runner_over(model)
    return torch.cat([runner.step([("a", ids[:9])]), runner.step([("a", ids[9:])])])


def test_all_families_that_are_read_are_tested() -> None:
    assert {"llama" if name == "mistral" else name for name in FAMILIES} == set(READ)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_that_it_was_made_from(family: str, tmp_path: Path) -> None:
    """Config, names, orders and folded numbers: in float32 nothing else can differ."""
    module, ids = family_module(family), prompt_ids(24)
    Writer(family, module, plain).write(tmp_path / "model.gguf")
    model = loaded(tmp_path / "model.gguf", tmp_path)
    assert_exact(logits_of(model, ids), oracle_logits(module, ids))


ROPES = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}


def test_factors_of_a_rotation_are_those_of_llama_3(tmp_path: Path) -> None:
    ropes = ROPES | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    module = family_module("llama", rope_parameters=ropes)
    factors = torch.nn.Parameter(torch.from_numpy(llama3_factors(module)))
    module.register_parameter("rope_freqs", factors)
    Writer("llama", module, plain).write(tmp_path / "model.gguf")
    ids = prompt_ids(24)
    model = loaded(tmp_path / "model.gguf", tmp_path)
    assert known_config(model_directory(tmp_path)).rope_parameters == ropes
    assert_exact(logits_of(model, ids), oracle_logits(module, ids))


def test_other_factors_are_refused(tmp_path: Path) -> None:
    module = family_module("llama")
    module.register_parameter("rope_freqs", torch.nn.Parameter(torch.linspace(1, 3, 32)))
    Writer("llama", module, plain).write(tmp_path / "model.gguf")
    with pytest.raises(ChangeSomething, match="not those of Llama 3"):
        gguf_directory(tmp_path / "model.gguf", tmp_path)


def test_a_vector_of_biases_has_its_rows_in_order(tmp_path: Path) -> None:
    module, ids = family_module("llama", attention_bias=True, mlp_bias=True), prompt_ids(24)
    Writer("llama", module, plain).write(tmp_path / "model.gguf")
    model = loaded(tmp_path / "model.gguf", tmp_path)
    assert_exact(logits_of(model, ids), oracle_logits(module, ids))
