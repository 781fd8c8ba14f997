"""Blocks of the packaged GGUF file, which its converted model keeps under int4."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvell.attention.choice import choose_kernels
from kvell.models.fused.grouped import Form
from kvell.models.loading.block_forms import row_blocks
from kvell.models.loading.gguf_weights import packaged_blocks
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.weight_files import SINGLE_FILE, read_weight_map
from kvell.models.text.tokenizer import Tokenizer
from tests.models.harness import oracle_logits, runner_over
from tests.shallow_model import write_shallow


def test_bytes_that_have_no_magnitude_are_quantised_again() -> None:
    drawn = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    rows = np.array(gguf.quantize(drawn, gguf.GGMLQuantizationType.Q8_0))
    rows.view(np.int8)[3, 10] = -128
    numbers = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType.Q8_0))
    weight = row_blocks(rows, "Q8_0").to_form(Form.INT8)
    assert int(weight.quants.min()) >= -127
    assert float((weight.unpack() - numbers).abs().max()) <= float(numbers.abs().max()) / 127


def test_blocks_of_other_numbers_are_not_taken(smollm2_path: Path, tmp_path: Path) -> None:
    """A converted model may have been changed: here layers are left out and renamed."""
    path = write_shallow(smollm2_path, tmp_path)
    names = set(packaged_blocks(read_weight_map(path)))
    assert {name for name in names if ".layers." in name} == {
        name for name in names if ".layers.0." in name
    }
    assert "model.embed_tokens.weight" in names
    weights = load_file(path / SINGLE_FILE)
    weights["model.embed_tokens.weight"][-1, 0] += 1
    save_file(weights, path / SINGLE_FILE, {"format": "pt"})
    changed = set(packaged_blocks(read_weight_map(path)))
    assert changed == names - {"model.embed_tokens.weight"}


def test_the_packaged_model_is_served_as_it_is(
    smollm2_path: Path, smollm2_tokenizer: Tokenizer
) -> None:
    """Every matrix has its blocks' own numbers; int4 errs less than transformers in bfloat16."""
    blocks = packaged_blocks(read_weight_map(smollm2_path))
    with safe_open(smollm2_path / SINGLE_FILE, "pt") as weights:
        matrices = [name for name in weights.keys() if "norm" not in name]  # noqa: SIM118
        assert set(blocks) == set(matrices)
        for name in matrices[::17]:
            assert torch.equal(blocks[name].unpack(torch.float32), weights.get_tensor(name))
    ids = smollm2_tokenizer.encode("In the beginning the universe was created. " * 3).tolist()
    kernels = choose_kernels(torch.device("cpu"))
    if kernels.name != "native":
        pytest.skip("built without a compiler")
    oracle = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    exact = oracle_logits(oracle, ids)
    theirs = oracle_logits(oracle.bfloat16(), ids)
    model = load_paged_model(smollm2_path, kernels, torch.bfloat16, quantization="int4")
    runner = runner_over(model)
    ours = torch.cat([runner.step([("a", ids[:9])]), runner.step([("a", ids[9:])])])
    errors = [float((x - exact).double().square().mean().sqrt()) for x in (ours, theirs)]
    assert 0 < errors[0] <= 1.25 * errors[1]
    assert model.weight_bytes < 105e6
