"""Draft tokens from what a text repeats, and which of them a step takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.planning.proposals import LOOKUP_WINDOW_TOKENS, propose
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan, StepResult, TokenWork, verify
from kvell.engine.requests.request import Request
from kvell.vocabulary import StepNumber
from tests.engine.works import spec_of, work_of

GREEDY = SamplingParams(temperature=0)


def proposed(tokens: list[int], count: int = 4, longest: int = 5, shortest: int = 2) -> list[int]:
    found = propose(bytearray(np.asarray(tokens, "<i4").tobytes()), count, longest, shortest)
    assert found.dtype == np.int32
    return [int(token) for token in found]


def obvious(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for following in range(start + size, start + size + count):
                    text.append(text[following])
                return text[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 6), st.integers(1, 4), st.data())
def test_draft_tokens_follow_the_rule(
    tokens: list[int], count: int, longest: int, data: st.DataObject
) -> None:
    shortest = data.draw(st.integers(1, longest))
    assert proposed(tokens, count, longest, shortest) == obvious(tokens, count, longest, shortest)


@given(st.lists(st.sampled_from([0, 1, 256, 257, 1 << 16, 1 << 24, 0x01010101]), max_size=30))
def test_bytes_of_two_tokens_are_never_taken_for_one(tokens: list[int]) -> None:
    assert proposed(tokens, 3, 3, 1) == obvious(tokens, 3, 3, 1)


def test_the_longest_suffix_wins_over_a_more_recent_one() -> None:
    assert proposed([1, 2, 3, 10, 9, 2, 3, 20, 1, 2, 3], 1, 3, 2) == [10]
    assert proposed([1, 2, 3, 10, 9, 2, 3, 20, 1, 2, 3], 1, 2, 2) == [20]


def test_of_equal_ones_the_most_recent_wins() -> None:
    assert proposed([1, 2, 10, 11, 1, 2, 20, 21, 1, 2], 2) == [20, 21]


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    assert proposed([7, 8, 9, 7, 8, 9, 7, 8], 7) == [9, 7, 8, 9, 7, 8, 9]
    assert proposed([5, 5, 5], 4) == [5, 5, 5, 5]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 1]])
def test_nothing_is_drafted_where_the_text_never_ended_like_this(tokens: list[int]) -> None:
    assert proposed(tokens) == []


def test_tokens_of_images_are_never_drafted() -> None:
    assert proposed([1, 2, 5, -7, -7, 6, 1, 2]) == [5]
    assert proposed([1, 2, -7, -7, 6, 1, 2]) == []


def test_only_the_newest_tokens_are_looked_at() -> None:
    filler = list(range(10, LOOKUP_WINDOW_TOKENS + 10))
    assert proposed([1, 2, 3, *filler[:-10], 1, 2], 1) == [3]
    assert proposed([1, 2, 3, *filler, 1, 2], 1) == []


def test_a_request_keeps_its_text_for_looking_up() -> None:
    request = Request(spec_of([3, -1, 1 << 20]), 0, 9, "")
    for token in (5, 6):
        kept = request.history()
        assert np.frombuffer(bytes(kept), "<i4").tolist() == request.tokens(0, 9).tolist()
        request.output.append(token)
    assert request.history() is kept, "it grows and is not copied"
    assert np.frombuffer(bytes(kept), "<i4").tolist() == [3, -1, 1 << 20, 5, 6]


def work(tokens: list[int], draft_tokens: int = 0, samples: bool = True) -> TokenWork:
    ids = np.asarray(tokens, np.int32)
    sampling = GREEDY if samples else None
    return work_of("a", 1, 3, len(ids), ids, sampling, 2, proposed=draft_tokens)


def yields(sampled: list[int], *works: TokenWork) -> list[tuple[int, ...]]:
    result = verify(StepPlan(StepNumber(4), work=works), sampled)
    assert result.step == 4
    return result.by_work()


@pytest.mark.parametrize(
    ("sampled", "kept"),
    [
        ([7, 8, 9], (7, 8, 9)),
        ([7, 8, 1], (7, 8, 1)),
        ([7, 1, 9], (7, 1)),
        ([1, 8, 9], (1,)),
    ],
)
def test_right_draft_tokens_and_the_token_after_them_are_kept(
    sampled: list[int], kept: tuple[int, ...]
) -> None:
    assert yields(sampled, work([5, 7, 8], 2)) == [kept]


def test_each_work_is_verified_on_its_own() -> None:
    prefill, last_chunk = work([1, 2, 3], samples=False), work([4, 5])
    works = (work([5, 7], 1), prefill, work([6, 7], 1), last_chunk)
    assert [w.num_logits for w in works] == [2, 0, 2, 1]
    assert StepPlan(StepNumber(4), work=works).num_logits == 5
    assert yields([7, 2, 3, 7, 8], *works) == [(7, 2), (3,), (8,)]


def test_a_step_without_draft_tokens_says_nothing_of_counts() -> None:
    plan = StepPlan(StepNumber(4), work=(work([5]), work([6])))
    assert verify(plan, [1, 2]) == StepResult(StepNumber(4), (1, 2))
    assert verify(StepPlan(StepNumber(5)), []) == StepResult(StepNumber(5), ())


@pytest.mark.parametrize("counts", [(1,), (2, 2), (3, 0), (4, -1)])
def test_counts_that_are_not_of_the_tokens_are_told(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not"):
        StepResult(StepNumber(1), (7, 8, 9), counts).by_work()
