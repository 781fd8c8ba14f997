"""Requests forced out to the CPU buffer and back, for every kind of layer: tokens stay exact."""

import pytest

from kvell.errors import ChangeSomething
from kvell.vocabulary import MIB
from tests.engine.copying import damage_buffer
from tests.models.cases import some_fast
from tests.models.served import Served
from tests.models.serving.buffers import force, outputs

ARCHITECTURES = [
    "Gemma3ForCausalLM",
    "Llama4ForCausalLM",
    "JambaForCausalLM",
    "Qwen3NextForCausalLM",
    "Lfm2ForCausalLM",
    "Mamba2ForCausalLM",
]
FAST = ("Gemma3ForCausalLM", "JambaForCausalLM")


@pytest.mark.parametrize("architecture", some_fast(ARCHITECTURES, FAST))
def test_tokens_are_those_of_who_was_never_preempted(architecture: str) -> None:
    expected = outputs(Served(architecture, batched=64))
    run = Served(architecture, batched=64, cpu_buffer_bytes=8 * MIB)
    swapping = force(run.engine, 1)
    assert outputs(run) == expected
    assert swapping.rungs["swap_in"] > 4
    assert swapping.buffer.counts.in_bytes > 0
    swapping.drop_prefixes()
    swapping.begin()
    assert swapping.buffer.used_large == 0


@pytest.mark.parametrize("architecture", some_fast(FAST, FAST[1:]))
def test_tokens_are_exact_while_it_draft_tokens_too(architecture: str) -> None:
    expected = outputs(Served(architecture, batched=64))
    run = Served(architecture, batched=64, cpu_buffer_bytes=8 * MIB, num_speculative_tokens=3)
    swapping = force(run.engine, 2)
    assert outputs(run) == expected
    assert swapping.rungs["swap_in"] > 2


def test_the_contract_counts_the_buffer_in_whole_large_pages() -> None:
    with_one = Served("Gemma3ForCausalLM", cpu_buffer_bytes=8 * MIB + 5).engine.contract
    without = Served("Gemma3ForCausalLM").engine.contract
    assert (
        with_one.cpu_buffer_bytes
        == 8 * MIB // with_one.large_page_bytes * with_one.large_page_bytes
    )
    assert with_one.contract_bytes == without.contract_bytes + with_one.cpu_buffer_bytes
    assert any("CPU buffer" in line for line in with_one.lines())
    assert not any("CPU buffer" in line for line in without.lines())
    assert without.parts()["cpu_buffer_bytes"] == 0


@pytest.mark.parametrize(
    ("size_bytes", "problem", "remedy"),
    [(5, "less than a large page", "at least --cpu-buffer"), (1 << 60, "free", "at most")],
)
def test_a_buffer_that_cannot_be_is_refused_by_name(
    size_bytes: int, problem: str, remedy: str
) -> None:
    with pytest.raises(ChangeSomething, match=problem) as refused:
        Served("Gemma3ForCausalLM", cpu_buffer_bytes=size_bytes)
    assert refused.value.field == "--cpu-buffer"
    assert remedy in refused.value.remedy


@pytest.mark.parametrize("architecture", some_fast(FAST, FAST[1:]))
def test_a_damaged_buffer_changes_the_answer(architecture: str) -> None:
    """What comes back is read: the equality can fail."""
    expected = outputs(Served(architecture, batched=64))
    run = Served(architecture, batched=64, cpu_buffer_bytes=8 * MIB)
    force(run.engine, 1)
    damage_buffer(run.engine.runner)
    assert outputs(run) != expected
