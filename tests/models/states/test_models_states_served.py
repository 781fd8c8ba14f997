"""Families with states, served by the whole engine: where hits lie, and what they resume from."""

import pytest

from kvell.memory import GroupKind, Manager
from tests.models.cases import covering, families
from tests.models.harness import STATES, prompt_ids
from tests.models.served import Served, assert_all, error, has_attention

FAMILIES = families(STATES)
every_family = pytest.mark.parametrize("architecture", FAMILIES)


def aligned(architecture: str, length: int) -> int:
    """A branch's state is kept where pages of attention end too."""
    return length // 16 * 16 if has_attention(architecture) else length


@every_family
def test_a_request_that_shares_a_hundred_tokens_hits_sixty_four(architecture: str) -> None:
    """States are kept at 64 tokens; the branch at 100 is kept by the one that finds it."""
    shared, served = prompt_ids(100), Served(architecture)
    hits = [served.ask(f"q{i}", shared + prompt_ids(40, seed=i)).cached_tokens for i in range(3)]
    assert hits == [0, 64, aligned(architecture, 100)]
    assert_all(served)


@covering({"architecture": FAMILIES, "batched": [256, 37]}, together=1)
def test_the_next_turn_hits_all_of_the_last_one(architecture: str, batched: int) -> None:
    """The state stays where it is, the half full page of attention is copied."""
    served = Served(architecture, batched=batched)
    known = prompt_ids(83)
    hits = []
    for turn in range(3):
        answer = served.ask(f"turn{turn}", known, outputs=9)
        hits.append(answer.cached_tokens)
        known = known + answer.output + prompt_ids(11, seed=turn)
    ends = [83 + 20 * turn + 9 - 1 for turn in range(2)]
    assert hits == [0, *ends], "all that was computed: the last token was only sampled"
    assert_all(served)


@every_family
def test_requests_resume_side_by_side_from_one_state(architecture: str) -> None:
    """A checkpoint is copied, not used up."""
    shared, served = prompt_ids(100), Served(architecture, batched=50)
    served.ask("first", shared + prompt_ids(20))
    for i in range(4):
        served.submit(f"q{i}", shared[:70] + prompt_ids(10 + i, seed=i), outputs=10)
    served.run()
    branch = aligned(architecture, 70)
    assert [served.answers[f"q{i}"].cached_tokens for i in range(4)] == [64, *[branch] * 3]
    assert_all(served)


@covering(
    {
        "architecture": ["FalconH1ForCausalLM", "Qwen3NextForCausalLM"],
        "manager": ["jenga", "paged", "max-page", "static"],
    },
    together=1,
)
def test_every_manager_of_memory_gives_the_same_hits(architecture: str, manager: Manager) -> None:
    """States in slices, in pages of their own size and in padded ones."""
    shared, served = prompt_ids(100), Served(architecture, manager=manager)
    hits = [served.ask(f"q{i}", shared + prompt_ids(30, seed=i)).cached_tokens for i in range(3)]
    assert hits == [0, 64, 96]
    assert_all(served)


@every_family
def test_a_damaged_checkpoint_changes_the_answer(architecture: str) -> None:
    """What is resumed is what the page says: this test sees that the others could fail."""
    shared, served = prompt_ids(64), Served(architecture)
    served.ask("first", shared + prompt_ids(20))
    snapshot = served.engine.core.memory.snapshot()
    states = [g for g, spec in enumerate(served.layout.groups) if spec.kind is GroupKind.STATE]
    kept = [entry for entry in snapshot.index if entry.group in states and entry.end == 64]
    assert len(kept) == served.layout.groups[states[0]].slices
    for entry in kept:
        page = served.page_bytes(entry.group, entry.page)
        page.copy_(page.roll(64))
    answer = served.ask("second", shared + prompt_ids(20, seed=1))
    assert answer.cached_tokens == 64
    assert not error(architecture, answer) <= 1e-3, "not a number is an error too"
