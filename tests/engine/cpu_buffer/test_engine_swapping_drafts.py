"""Requests forced to the CPU buffer and back while a draft model makes their draft tokens."""

import pytest

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.vocabulary import MIB
from tests.elastic.buffer_audit import audit_pages
from tests.engine.planning.drafts import answers, assert_drafted_both_ways, draft_of, plain
from tests.engine.speculating import GREEDY, SEEDED, Served, blurred, served, words_module
from tests.models.cases import covering, long_unless
from tests.models.serving.buffers import force

PAIRS = [
    ("LlamaForCausalLM", "blurred"),
    ("Gemma3ForCausalLM", "blurred"),
    ("JambaForCausalLM", "blurred"),
    ("LlamaForCausalLM", "Gemma3ForCausalLM"),
    ("JambaForCausalLM", "LlamaForCausalLM"),
]
MARKED = [pytest.param(*pair, marks=long_unless(pair in (PAIRS[1], PAIRS[4]))) for pair in PAIRS]
SAMPLING = [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")]


def assert_drafts_pages_came_back(run: Served) -> None:
    groups = run.layout.groups
    for moved in ("offloads", "fetches"):
        rows = [row for plan in run.plans for row in getattr(plan, moved)[:, 0].tolist()]
        assert {groups[row].is_draft for row in rows} == {True, False}, moved


@covering({"architecture,draft": MARKED, "sampling": SAMPLING}, together=1)
def test_tokens_are_those_of_who_was_never_preempted(
    architecture: str, draft: str, sampling: SamplingParams
) -> None:
    module = words_module(architecture)
    run = served(module, 3, draft_of(module, draft), cpu_buffer_bytes=16 * MIB)
    swapping = force(run.engine, 1)
    assert answers(run, sampling) == plain(architecture, sampling).outputs
    assert swapping.rungs["swap_in"] > 3
    assert_drafted_both_ways(run)
    assert_drafts_pages_came_back(run)
    swapping.begin()
    assert swapping.buffer.used_large == 0
    assert audit_pages(swapping.buffer) == []


def test_what_comes_back_is_what_the_draft_model_wrote() -> None:
    """A model that drafts for itself is always right, wherever its pages have been."""
    module = words_module("LlamaForCausalLM")
    run = served(module, 3, module, cpu_buffer_bytes=16 * MIB)
    swapping = force(run.engine, 1)
    assert answers(run) == plain("LlamaForCausalLM").outputs
    assert swapping.rungs["swap_in"] > 1
    assert_drafts_pages_came_back(run)
    assert run.stats.spec_decode_accepted_tokens == run.stats.spec_decode_draft_tokens > 0


def test_a_draft_model_whose_pages_came_back_damaged_is_wrong() -> None:
    """The test above can fail; the answers stay the same."""
    module = words_module("LlamaForCausalLM")
    run = served(module, 3, module, cpu_buffer_bytes=16 * MIB)
    force(run.engine, 1)
    pages = run.runner.pages  # type: ignore[attr-defined]
    fetch, groups = pages.fetch, run.layout.groups

    def damaged(rows: object) -> None:
        fetch(rows)
        for group, _, page in rows.tolist():  # type: ignore[attr-defined]
            stride = groups[group].page_stride_bytes
            if groups[group].is_draft:
                pages.pool[page * stride : (page + 1) * stride] = 0

    pages.fetch = damaged
    assert answers(run) == plain("LlamaForCausalLM").outputs
    assert run.stats.spec_decode_accepted_tokens < run.stats.spec_decode_draft_tokens


def test_blurred_drafts_are_wrong_now_and_then() -> None:
    module = words_module("LlamaForCausalLM")
    run = served(module, 3, blurred(module, 0.05))
    answers(run)
    assert_drafted_both_ways(run)
