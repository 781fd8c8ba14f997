"""Requests forced out to the CPU buffer and back, for every kind of layer: tokens stay exact."""

import random
from collections.abc import Sequence

import pytest

from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.engine import Engine
from kvell.engine.planning.step_memory import RigidMemory
from kvell.engine.protocol.messages import Tokens
from kvell.errors import ChangeSomething
from kvell.memory import MemoryCore, audit
from kvell.vocabulary import MIB
from tests.engine.copying import damage_buffer
from tests.engine.swapping import Always
from tests.models.cases import some_fast
from tests.models.served import Served

ARCHITECTURES = [
    "Gemma3ForCausalLM",
    "Llama4ForCausalLM",
    "JambaForCausalLM",
    "Qwen3NextForCausalLM",
    "Lfm2ForCausalLM",
    "Mamba2ForCausalLM",
]
FAST = ("Gemma3ForCausalLM", "JambaForCausalLM")
PROMPTS = [[(7 * n + i * i) % 199 + 3 for i in range(20 + 31 * n)] for n in range(4)]


class Forcing(RigidMemory):
    """Refuses decodes their memory when a seed says so: the youngest is preempted."""

    def __init__(self, core: MemoryCore, seed: int) -> None:
        super().__init__(core)
        self._draw = random.Random(seed)

    def before_decodes(self, lengths: Sequence[int]) -> bool:
        return self._draw.random() > 0.3


def force(engine: Engine, seed: int) -> Swapping:
    """The engine preempts at random, and swaps whom it can."""
    scheduler = engine.core._scheduler
    scheduler._chunks.memory = Forcing(engine.core.memory, seed)
    swapping = scheduler.swapping
    assert swapping is not None
    swapping._rule = Always()
    return swapping


def outputs(run: Served) -> dict[str, list[int]]:
    """Tokens of every request, however many a step brings; the memory is audited."""
    engine, tokens = run.engine, dict[str, list[int]]()
    for number, prompt in enumerate(PROMPTS):
        run.submit(str(number), prompt, 14)
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        assert audit(run.layout, engine.core.memory.snapshot()) == []
    return tokens


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
