"""Decode steps of all families on a GPU without numbers: nothing waits, all is on the device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models import harness
from tests.models.captured.fake_decode import decode_tape
from tests.models.captured.families import FAMILIES
from tests.models.captured.tape import NotRepeatableError
from tests.models.cases import long_unless
from tests.models.harness import tiny_module

SHAPES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128},
}

COMPUTED = "Gemma3nForCausalLM"
"""Its modules copy a number from the host in each step, which no record repeats: a server that
cannot record a model computes its steps."""


def tiny(architecture: str) -> Callable[[], Any]:
    """Makes a tiny model of a family, in bfloat16; on the meta device it has no numbers."""
    module = tiny_module(architecture)
    config = copy.deepcopy(module.config)  # a paged model changes it
    return lambda: type(module)._from_config(config, dtype=torch.bfloat16)


def llama(shape: str) -> Any:
    """A Llama of a real width, with fewer layers."""
    config = LlamaConfig(
        vocab_size=128_256, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, **SHAPES[shape],
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=long_unless(name in FAMILIES))
        for name in sorted(set(harness.FAMILIES) - {COMPUTED})
    ],
)
def test_a_decode_step_waits_for_nothing(architecture: str) -> None:
    tape, _ = decode_tape(tiny(architecture))
    assert len(tape.lines) > 50


@pytest.mark.long
def test_a_family_that_no_gpu_records() -> None:
    with pytest.raises(NotRepeatableError, match="made of Python's numbers"):
        decode_tape(tiny(COMPUTED))


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_real_widths(shape: str) -> None:
    tape, launches = decode_tape(lambda: llama(shape))
    assert launches == 2 * 2, "each layer writes and attends"
    assert not any("cpu" in line for line in tape.lines)
