"""How likely tokens are: torch's log_softmax in double precision, counted ranks, sorted tops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.sampling.controls import all_token_logprobs, token_logprobs

WORDS = 30
ALLOWED_ERROR = 1e-5

rows = st.lists(st.floats(-60, 60, width=32), min_size=WORDS, max_size=WORDS)
words = st.integers(0, WORDS - 1)
asked = st.integers(0, 20)


@given(st.lists(st.tuples(rows, words), min_size=1, max_size=4), asked)
def test_logarithms_are_those_of_double_precision(
    given_rows: list[tuple[list[float], int]], most: int
) -> None:
    logits = torch.tensor([row for row, _ in given_rows])
    exact = logits.double().log_softmax(-1)
    told = all_token_logprobs(logits, [token for _, token in given_rows], most)
    assert len(told) == len(given_rows)
    for one, (_, token), line in zip(told, given_rows, exact, strict=True):
        assert one.logprob == pytest.approx(float(line[token]), abs=ALLOWED_ERROR)
        for other, logprob in one.top:
            assert logprob == pytest.approx(float(line[other]), abs=ALLOWED_ERROR)


@given(rows, words, asked)
def test_tops_are_the_likeliest_in_order_and_as_many_as_asked(
    row: list[float], token: int, most: int
) -> None:
    told = token_logprobs(torch.tensor(row), token, most)
    assert len(told.top) == len({other for other, _ in told.top}) == most
    logprobs = [logprob for _, logprob in told.top]
    assert logprobs == sorted(logprobs, reverse=True)
    kept = {other for other, _ in told.top}
    left = [row[other] for other in range(WORDS) if other not in kept]
    assert not kept or max(left) <= min(row[other] for other in kept) + ALLOWED_ERROR
    assert all(isinstance(other, int) and isinstance(each, float) for other, each in told.top)


@given(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=WORDS, max_size=WORDS), words)
def test_a_rank_counts_the_likelier_tokens_and_ties_share_it(row: list[float], token: int) -> None:
    told = token_logprobs(torch.tensor(row), token, 0)
    assert told.rank == 1 + sum(other > row[token] for other in row)


def test_none_asked_tells_of_the_token_alone() -> None:
    told = token_logprobs(torch.zeros(WORDS), 4, 0)
    assert (told.rank, told.top) == (1, ())
    assert told.logprob == pytest.approx(-math.log(WORDS), abs=ALLOWED_ERROR)


def test_the_top_has_the_token_itself_where_it_is_likely() -> None:
    logits = torch.tensor(np.linspace(0, 5, WORDS), dtype=torch.float32)
    told = token_logprobs(logits, WORDS - 1, 2)
    assert told.rank == 1
    assert told.top[0] == (WORDS - 1, told.logprob)
    assert [token for token, _ in told.top] == [WORDS - 1, WORDS - 2]


def test_logits_are_left_alone_and_rows_do_not_touch_each_other() -> None:
    logits = torch.randn(5, WORDS, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    together = all_token_logprobs(logits, [1, 2, 3, 4, 5], 3)
    alone = tuple(token_logprobs(row, i, 3) for i, row in enumerate(logits, 1))
    assert together == alone
    assert torch.equal(logits, before)
