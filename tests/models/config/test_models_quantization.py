"""``--quantization``: who may have it, and what is said to the others."""

from pathlib import Path

import pytest
import torch

from kvell.attention.portable import PortableKernels
from kvell.errors import ChangeSomething
from kvell.models.config.quantization import QUANTIZATIONS, require_quantization
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.random_weights import random_module, write_random_model
from tests.models.fused_models import native
from tests.models.harness import prompt_ids, runner_over, tiny_config


def test_only_named_ones_are_served(tmp_path: Path) -> None:
    for name in QUANTIZATIONS:
        require_quantization(name)
    with pytest.raises(ChangeSomething, match=r"--quantization.*int8"):
        load_paged_model(tmp_path, PortableKernels(), quantization="int2")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_loading_packs(tmp_path: Path, quantization: str) -> None:
    path = write_random_model(tmp_path / "m", tiny_config("LlamaForCausalLM"), seed=3, scale=8.0)
    kernels = native.NativeKernels(1)
    plain, model = (load_paged_model(path, kernels, quantization=q) for q in ("none", quantization))
    assert model.weight_bytes < 0.6 * plain.weight_bytes
    logits = [runner_over(one).step([("a", prompt_ids(20))]) for one in (plain, model)]
    error = (logits[0] - logits[1]).square().mean().sqrt() / logits[0].std()
    assert 0 < error < (0.1 if quantization == "int8" else 0.9)


@pytest.mark.parametrize(
    ("architecture", "fused", "kernels"),
    [
        ("GptOssForCausalLM", True, native.NativeKernels(1)),
        ("LlamaForCausalLM", False, native.NativeKernels(1)),
        ("LlamaForCausalLM", True, PortableKernels()),
    ],
    ids=["no recipe", "enforce_eager", "not compiled"],
)
def test_whoever_has_no_fused_pass_is_told(
    tmp_path: Path, architecture: str, fused: bool, kernels: PortableKernels
) -> None:
    path = write_random_model(tmp_path / "m", tiny_config(architecture), seed=3, scale=8.0)
    with pytest.raises(ChangeSomething, match=r"--quantization.*leave it out"):
        load_paged_model(path, kernels, fused=fused, quantization="int8")


def test_numbers_that_cannot_be_kept_are_told(tmp_path: Path) -> None:
    module = random_module(tiny_config("LlamaForCausalLM"), 3, torch.float32, 8.0)
    module.model.layers[1].mlp.up_proj.weight.data[2, 3] = 1e12
    module.save_pretrained(tmp_path / "m")
    with pytest.raises(ChangeSomething, match=r"--quantization.*half precision"):
        load_paged_model(tmp_path / "m", native.NativeKernels(1), quantization="int4")
