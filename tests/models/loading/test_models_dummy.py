"""Random weights in place of a model's files."""

import os
from pathlib import Path

import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.device.shared_weights import SharedWeights
from kvell.errors import ChangeSomething
from kvell.models.loading.loading import load_paged_model
from tests.models.harness import tiny_config
from tests.models.loading.recorder import logits_of

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_config("LlamaForCausalLM").save_pretrained(tmp_path)
    return tmp_path


def test_a_config_is_enough(directory: Path) -> None:
    model = load_paged_model(directory, choose_kernels(CPU), is_dummy=True)
    assert [file.name for file in directory.glob("*.safetensors")] == []
    assert bool(logits_of(model).isfinite().all())
    assert model.weight_bytes > 0


def test_without_it_the_missing_files_are_an_error(directory: Path) -> None:
    with pytest.raises(ChangeSomething, match="safetensors"):
        load_paged_model(directory, choose_kernels(CPU))


def test_instances_share_the_same_weights(directory: Path) -> None:
    descriptor = os.memfd_create("weights")
    try:
        shared = SharedWeights(descriptor)
        several = [
            load_paged_model(directory, choose_kernels(CPU), is_dummy=True, shared=shared)
            for _ in range(2)
        ]
        assert torch.equal(*map(logits_of, several))
        assert len(shared.entries()) == 1
        del several
    finally:
        os.close(descriptor)
