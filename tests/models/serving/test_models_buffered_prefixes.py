"""Prefixes evicted from the pool and found in the CPU buffer, for attention of any kind: exact."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvell.engine.core.core import evict_unused
from kvell.mempool.tiers.buffered import needed_pages
from kvell.vocabulary import MIB
from tests.engine.copying import damage_buffer
from tests.engine.seen import copy_out_everything, use_rule
from tests.engine.swapping import Always
from tests.models.served import Served, assert_all
from tests.models.serving.buffers import TEXT, ask_again, caching, evict

ARCHITECTURES = [
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "Llama4ForCausalLM",
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_next_turn_goes_on_from_the_buffer_exactly(architecture: str) -> None:
    run, swapping = caching(architecture)
    cached = ask_again(run, TEXT)
    assert cached >= len(TEXT), "its whole prompt, and some of its answer"
    assert swapping.counters()["cache_in"] == 1
    assert swapping.prefixes is not None
    assert swapping.prefixes.hit_tokens == cached
    assert_all(run)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_another_question_about_the_same_text_does_too(architecture: str) -> None:
    run, _ = caching(architecture)
    run.ask("first", [*TEXT, 4, 5, 6], 8)
    run.ask("between", [5, 6, 7], 2)
    evict(run)
    answer = run.ask("second", [*TEXT, 90, 91, 92, 93], 8)
    pages = run.layout.groups[0].page_tokens
    expected = len(TEXT) // pages * pages if architecture == "LlamaForCausalLM" else 0
    assert answer.cached_tokens >= expected
    assert_all(run)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_damaged_buffer_changes_the_answer(architecture: str) -> None:
    """What comes back is read: the equality can fail."""
    run, _ = caching(architecture)
    damage_buffer(run.engine.runner)
    ask_again(run, TEXT)
    with pytest.raises(AssertionError):
        assert_all(run)


@pytest.mark.parametrize("architecture", ["JambaForCausalLM", "Mamba2ForCausalLM"])
def test_a_state_comes_back_where_it_stood(architecture: str) -> None:
    """The turn goes on exactly where the one before ended, and not from its last whole page."""
    run, swapping = caching(architecture)
    cached = ask_again(run, TEXT)
    assert cached == len(TEXT) + 8 - 1, "its last token had not been computed"
    assert swapping.counters()["cache_in"] == 1
    assert_all(run)


def evict_part(run: Served, text: Sequence[int], *, group: int, first: bool) -> int:
    """Take large pages away in which the pool caches half of a group's pages of a text; returns
    how many pages of the text are left, those of other groups included."""
    core = run.engine.core.memory
    known = core.known(np.asarray(text, np.int32), "")
    own = known[known[:, 0] == group]
    half = own[: len(own) // 2] if first else own[len(own) // 2 :]
    larges = {int(page) // run.layout.groups[group].pages_per_large for page in half[:, 2]}
    core.withhold(np.asarray(sorted(larges), np.int32))  # type: ignore[attr-defined]
    core.restore(np.asarray(sorted(larges), np.int32))  # type: ignore[attr-defined]
    return len(core.known(np.asarray(text, np.int32), ""))


@pytest.mark.parametrize(
    ("architecture", "group", "first"),
    [
        ("LlamaForCausalLM", 0, False),
        ("LlamaForCausalLM", 0, True),
        ("Gemma3ForCausalLM", 0, False),
        ("Gemma3ForCausalLM", 1, True),
        ("JambaForCausalLM", 0, False),
        ("JambaForCausalLM", 1, False),
    ],
)
def test_half_in_the_pool_and_half_in_the_buffer_is_one_hit(
    architecture: str, group: int, first: bool
) -> None:
    run, swapping = caching(architecture)
    answer = run.ask("first", TEXT, 8)
    run.ask("between", [5, 6, 7], 2)
    turn = [*TEXT, *answer.output, 9, 8, 7]
    assert evict_part(run, turn, group=group, first=first) > 0
    in_pool = run.engine.core.memory.peek(np.asarray(turn, np.int32), "")
    cached = run.ask("next turn", turn, 8).cached_tokens
    assert cached >= len(TEXT) > in_pool
    needs = sum(sum(1 for _ in needed_pages(one, cached)) for one in run.layout.groups)
    assert 0 < swapping.buffer.counts.in_pages < needs, "some pages came, and some were there"
    assert swapping.prefixes is not None
    assert 0 < swapping.prefixes.hit_tokens <= cached - in_pool
    assert_all(run)


def test_a_draft_models_pages_are_kept_beside_its_models() -> None:
    """Its guesses are right after a prefix from the buffer too: it drafts for itself."""
    from tests.engine.speculating import GREEDY, prompts, served, words_module

    module = words_module("LlamaForCausalLM")
    run = served(module, 3, module, cpu_buffer_bytes=8 * MIB)
    scheduler = run.engine.core.scheduler
    copy_out_everything(run.engine.core)
    assert scheduler.swapping is not None and scheduler.swapping.prefixes is not None
    use_rule(scheduler.swapping, Always())
    asked = prompts(3, 0)
    run.ask(asked, GREEDY)
    run.ask(prompts(2, 1), GREEDY)
    assert run.stats.rungs["cache_out"] > 0
    before = run.stats
    evict_unused(run.engine.core.memory, run.engine.core.step)
    again = {f"{name}/again": prompt for name, prompt in asked.items()}
    run.ask(again, GREEDY)
    assert run.stats.rungs["cache_in"] > 0
    drafted = run.stats.spec_decode_draft_tokens - before.spec_decode_draft_tokens
    accepted = run.stats.spec_decode_accepted_tokens - before.spec_decode_accepted_tokens
    assert accepted > 0.9 * drafted > 0
