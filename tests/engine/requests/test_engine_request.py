"""A request's tokens across prompt and output, and its state."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.requests.counting import (
    STEP_TOKENS_BUCKETS,
    DraftTokens,
    StepSizes,
    TeamCounts,
)
from kvell.engine.requests.plan import PENDING, TeamTime
from kvell.engine.requests.request import NO_HANDLE, Request, RequestState
from tests.engine.works import spec_of


def request(prompt: list[int], output: list[int], computed: int = 0) -> Request:
    made = Request(spec_of(prompt), 0, 16, cache_root="")
    made.output.extend(output)
    made.computed = computed
    return made


tokens = st.lists(st.integers(0, 99), max_size=8)


@given(tokens, tokens, st.data())
def test_any_span_of_prompt_and_output_is_int32(
    prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    made, known = request(prompt, output), prompt + output
    start = data.draw(st.integers(0, len(known)))
    end = data.draw(st.integers(start, len(known)))
    span = made.tokens(start, end)
    assert span.dtype == np.int32
    assert span.tolist() == known[start:end]
    assert made.num_tokens == len(known)


@given(tokens, tokens, st.integers(0, 2), st.data())
def test_tokens_that_are_being_drawn_have_a_place(
    prompt: list[int], output: list[int], drawing: int, data: st.DataObject
) -> None:
    made, known = request(prompt, output), [*prompt, *output, *[PENDING] * drawing]
    made.drawing = drawing
    start = data.draw(st.integers(0, len(known)))
    end = data.draw(st.integers(start, len(known) + 2))
    assert made.tokens(start, end).tolist() == known[start:end]
    assert made.num_tokens == len(known)


def test_a_step_in_flight_counts_as_computed_and_settles_with_its_result() -> None:
    made = request([1, 2, 3], [])
    made.begin(3, draws=True)
    assert (made.computed, made.settled, made.num_output, made.remaining) == (3, 0, 1, 1)
    assert made.is_decoding
    made.begin(4, draws=True)
    made.settle(3, draws=True)
    made.output.append(9)
    assert (made.computed, made.settled, made.num_output) == (4, 3, 2)


def test_nothing_is_wanted_when_the_last_token_is_being_drawn() -> None:
    made = request([1, 2, 3], [4] * 15)
    assert made.wants_work
    made.begin(18, draws=True)
    assert not made.wants_work


def test_a_span_of_the_prompt_is_not_copied() -> None:
    made = request([1, 2, 3], [4])
    assert np.shares_memory(made.tokens(0, 3), made.prompt)


def test_decoding_is_when_only_a_sampled_token_is_left() -> None:
    assert not request([1, 2], [], computed=0).is_decoding
    assert not request([1, 2], [], computed=1).is_decoding, "the prompt's last token"
    assert request([1, 2], [3], computed=2).is_decoding
    assert not request([1, 2], [3], computed=0).is_decoding, "preempted: all is to be recomputed"
    assert request([1, 2], [3], computed=0).remaining == 3


def test_a_new_request_waits_and_holds_nothing() -> None:
    made = request([1], [])
    assert (made.state, made.handle, made.cached_tokens) == (RequestState.WAITING, NO_HANDLE, None)
    assert made.finish_reason is None


def test_a_step_is_counted_in_the_smallest_bucket_that_holds_it() -> None:
    sizes = StepSizes()
    for tokens in (1, 2, 8, 9, 16_384, 16_385):
        sizes.add(tokens)
    found = sizes.by_size
    assert len(found) == len(STEP_TOKENS_BUCKETS) + 1
    assert found[:3] == [1, 2, 1]
    assert found[-2:] == [1, 1]
    assert sum(found) == 6
    assert sizes.tokens == 1 + 2 + 8 + 9 + 16_384 + 16_385


def test_nothing_was_drafted_yet() -> None:
    draft_tokens = DraftTokens()
    draft_tokens.add(0, 0)
    assert (draft_tokens.drafts, draft_tokens.draft_tokens, sum(draft_tokens.accepted)) == (
        0,
        0,
        0,
    )
    assert draft_tokens.accepted == []


def test_right_draft_tokens_are_counted_by_their_place() -> None:
    draft_tokens = DraftTokens()
    draft_tokens.add(2, 2)
    draft_tokens.add(4, 1)
    draft_tokens.add(3, 0)
    assert draft_tokens.drafts == 3
    assert draft_tokens.draft_tokens == 9
    assert draft_tokens.accepted == [2, 1, 0, 0]
    assert sum(draft_tokens.accepted) == 3


def test_a_team_is_counted_from_its_first_step() -> None:
    team = TeamCounts()
    team.add(None)
    assert team.figures() == {}
    team.add(TeamTime(2, True, 4.0, 1.5))
    team.add(None)
    team.add(TeamTime(1, False, 1.0, 0.25))
    assert team.figures() == {
        "threads": 1,
        "shared": 0,
        "thread_seconds": 5.0,
        "lost_seconds": 1.75,
    }
