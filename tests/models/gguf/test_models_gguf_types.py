"""Every type of GGUF's matrices, in compiled code and by modules, and models of several types."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.models.fused.grouped import Form
from kvell.models.gguf.block_forms import FORM_ERRORS, PLAIN_TYPES, row_blocks
from kvell.models.gguf.gguf_directory import gguf_directory
from kvell.models.loading.loading import load_paged_model
from tests.models.gguf.gguf_models import Writer, family_module, random_rows, type_of
from tests.models.harness import oracle_logits, prompt_ids, runner_over

CPU = torch.device("cpu")
LARGEST_ERRORS = {0.0: 1e-4, 4e-4: 1e-2, 6e-3: 0.15}
"""The largest error of a log probability, by the error of a form's numbers."""


def log_probability_error(file: Path, module: object, ids: list[int], *, fused: bool) -> float:
    """The largest error of a log probability of a token among the likeliest 20."""
    directory = gguf_directory(file, file.parent / "cache")
    model = load_paged_model(directory, choose_kernels(CPU), fused=fused)
    ours = runner_over(model).step([("a", ids)]).log_softmax(-1)
    theirs = oracle_logits(module, ids).log_softmax(-1)
    places = theirs.topk(20).indices
    return float((ours - theirs).gather(-1, places).abs().max())


@pytest.mark.parametrize("kind", FORM_ERRORS)
def test_numbers_in_a_form_are_those_of_the_library(kind: str) -> None:
    rows = random_rows(kind, 40, 512, seed=1)
    numbers = torch.from_numpy(gguf.dequantize(rows, type_of(kind)))
    form, error = FORM_ERRORS[kind]
    order = np.random.default_rng(0).permutation(40)
    block = row_blocks(rows, kind, order)
    assert (block.kind, block.form, block.shape) == (kind, form, (40, 512))
    assert torch.equal(block.unpack(torch.float32), numbers[order])
    made = block.grouped(form)
    assert made.form is form
    off = (made.unpack() - numbers[order]).square().mean().sqrt()
    assert float(off / numbers.square().mean().sqrt()) <= error + 1e-7
    assert block.grouped(Form.INT8).form is Form.INT8


@pytest.mark.parametrize("kind", [*FORM_ERRORS, *PLAIN_TYPES])
def test_a_model_of_one_type_answers_within_its_error(kind: str, tmp_path: Path) -> None:
    module, ids = family_module("llama"), prompt_ids(24)
    Writer("llama", module, lambda _: kind).write(tmp_path / "model.gguf")
    bound = LARGEST_ERRORS[FORM_ERRORS[kind][1]] if kind in FORM_ERRORS else 1e-4
    assert log_probability_error(tmp_path / "model.gguf", module, ids, fused=True) <= bound


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q4_1"])
def test_modules_have_the_blocks_own_numbers(kind: str, tmp_path: Path) -> None:
    module, ids = family_module("qwen3"), prompt_ids(24)
    Writer("qwen3", module, lambda _: kind).write(tmp_path / "model.gguf")
    assert log_probability_error(tmp_path / "model.gguf", module, ids, fused=False) <= 1e-4


def medium(name: str) -> str:
    """The types of a Q4_K_M file, and one of values beside quantised queries."""
    if name in ("token_embd.weight", "output.weight") or "ffn_down" in name:
        return "Q6_K"
    return {"blk.0.attn_v.weight": "Q6_K", "blk.1.attn_v.weight": "F16"}.get(name, "Q4_K")


def small(name: str) -> str:
    return "Q3_K" if "attn" in name else "Q5_K" if "ffn_up" in name else "IQ4_NL"


@pytest.mark.parametrize("kinds", [medium, small])
@pytest.mark.parametrize("family", ["falcon-h1", "gemma2", "qwen2", "smollm3"])
def test_a_model_of_several_types_in_parts(
    family: str, kinds: Callable[[str], str], tmp_path: Path
) -> None:
    module, ids = family_module(family, scale=2.0), prompt_ids(24)
    Writer(family, module, kinds).write(tmp_path / "model.gguf", parts_of=7)
    parts = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert len(parts) > 2
    error = log_probability_error(parts[1], module, ids, fused=True)
    assert 0 < error <= LARGEST_ERRORS[6e-3]
