"""Beam search against one that looks at every token of every beam, on tables for a model."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.logprobs import MAX_LOGPROBS, TokenLogprobs
from kvell.engine.requests.beam_search import (
    MAX_BEAM_WIDTH,
    Beam,
    BeamSearch,
    BeamSearchParams,
    EarlyStopping,
)
from kvell.errors import ChangeSomething
from tests.operations import operations

EOS = 0


@dataclass(frozen=True)
class TableModel:
    """Logits drawn anew for each text."""

    vocab_size: int
    seed: int

    def logprobs(self, tokens: tuple[int, ...]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        logits = np.random.default_rng([self.seed, *tokens]).normal(0, 2, self.vocab_size)
        told = logits - np.log(np.exp(logits).sum())
        return np.asarray(told)

    def told(self, beam: Beam, count: int) -> TokenLogprobs:
        """What an engine says of the greedy token and its alternatives."""
        own = self.logprobs(beam.token_ids)
        order = np.argsort(-own, kind="stable")[:count]
        top = tuple((int(token), float(own[token])) for token in order)
        return TokenLogprobs(top[0][1], 1, top)


def searched(model: TableModel, params: BeamSearchParams, *eos: int) -> BeamSearch:
    search = BeamSearch.of(params, frozenset(eos))
    while not search.is_over:
        asked = search.sampling().logprobs
        assert asked is not None
        search = search.after([model.told(beam, asked) for beam in search.running])
    return search


def naive(model: TableModel, params: BeamSearchParams, eos: set[int]) -> list[tuple[int, ...]]:
    """transformers' rules, with all tokens of all beams in one sorted list."""
    width, penalty = params.beam_width, params.length_penalty
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, params.max_tokens + 1):
        everything = [
            (total + float(one), (*tokens, token))
            for total, tokens in running
            for token, one in enumerate(model.logprobs(tokens))
            if token not in eos or length > params.min_tokens
        ]
        everything.sort(key=lambda one: -one[0])
        is_last = length == params.max_tokens
        ended = [one for one in everything[:width] if one[1][-1] in eos or is_last]
        finished += [(total / length**penalty, tokens) for total, tokens in ended]
        finished = sorted(finished, key=lambda one: -one[0])[:width]
        running = [one for one in everything if one[1][-1] not in eos][:width]
        if len(finished) == width:
            if params.early_stopping is True:
                break
            far = params.early_stopping == "never" and penalty > 0
            reach = params.max_tokens if far else length
            if running[0][0] / reach**penalty <= finished[-1][0]:
                break
    return [tokens for _, tokens in finished]


@given(
    model=st.builds(TableModel, st.integers(23, 40), st.integers(0, 10_000)),
    width=st.integers(1, MAX_BEAM_WIDTH),
    max_tokens=st.integers(1, 7),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early=st.sampled_from([True, False, "never"]),
    eos=st.sets(st.integers(0, 22), max_size=8),
    min_tokens=st.integers(0, 3),
)
def test_answers_are_those_of_a_search_that_looks_at_all_tokens(
    model: TableModel,
    width: int,
    max_tokens: int,
    penalty: float,
    early: EarlyStopping,
    eos: set[int],
    min_tokens: int,
) -> None:
    params = BeamSearchParams(
        width,
        max_tokens,
        length_penalty=penalty,
        early_stopping=early,
        min_tokens=min(min_tokens, max_tokens),
    )
    search = searched(model, params, *eos)
    assert [beam.token_ids for beam in search.finished] == naive(model, params, eos)
    assert len(search.finished) == width
    for beam in search.finished:
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] in eos else "length")
        steps = [model.logprobs(beam.token_ids[:i])[t] for i, t in enumerate(beam.token_ids)]
        assert beam.cumulative_logprob == pytest.approx(sum(steps))
        assert beam.score == pytest.approx(sum(steps) / len(steps) ** penalty)
        assert [told.logprob for told in beam.logprobs] == pytest.approx(steps)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 1.0, 3.0]))
def test_with_beams_for_everything_the_answers_are_the_best_of_all(
    seed: int, penalty: float
) -> None:
    """Two tokens and an end, at most three long: 15 answers, of which the best ten are found."""
    model = TableModel(3, seed)
    params = BeamSearchParams(10, 3, length_penalty=penalty, early_stopping="never")
    answers = [
        tokens
        for length in (1, 2, 3)
        for tokens in product(range(3), repeat=length)
        if EOS not in tokens[:-1] and (length == 3 or tokens[-1] == EOS)
    ]

    def score(tokens: tuple[int, ...]) -> float:
        steps = [model.logprobs(tokens[:i])[token] for i, token in enumerate(tokens)]
        return float(sum(steps) / len(tokens) ** penalty)

    best = sorted(answers, key=score, reverse=True)[:10]
    assert len(answers) == 15
    found = searched(model, params, EOS).finished
    assert [beam.score for beam in found] == pytest.approx([score(one) for one in best])
    assert {beam.token_ids for beam in found} == set(best)


def test_one_beam_is_greedy() -> None:
    model, tokens = TableModel(30, 5), list[int]()
    for _ in range(6):
        tokens.append(int(model.logprobs(tuple(tokens)).argmax()))
    [beam] = searched(model, BeamSearchParams(1, 6)).finished
    assert beam.token_ids == tuple(tokens)


def test_what_is_told_of_each_token_is_as_much_as_was_asked_for() -> None:
    model = TableModel(40, 9)
    for logprobs, told in ((None, 0), (0, 0), (3, 3), (MAX_LOGPROBS, MAX_LOGPROBS)):
        search = searched(model, BeamSearchParams(2, 4, logprobs=logprobs), EOS)
        for beam in search.finished:
            assert {len(one.top) for one in beam.logprobs} == {told}
            for place, one in enumerate(beam.logprobs):
                own = model.logprobs(beam.token_ids[:place])
                assert one.rank == 1 + int((own > own[beam.token_ids[place]]).sum())


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": MAX_BEAM_WIDTH + 1}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"temperature": -1.0}, "temperature"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    good: dict[str, Any] = {"beam_width": 2, "max_tokens": 8}
    with pytest.raises(ChangeSomething) as caught:
        BeamSearchParams(**good | fields)
    assert caught.value.field == name


def test_more_ends_than_can_be_told_apart_are_refused() -> None:
    params = BeamSearchParams(10, 8, stop_token_ids=tuple(range(1, 11)))
    with pytest.raises(ChangeSomething) as caught:
        BeamSearch.of(params, frozenset({EOS}))
    assert caught.value.field == "stop_token_ids"
    assert BeamSearch.of(replace(params, ignore_eos=True), frozenset({EOS})).candidates == 20


def test_a_step_costs_the_same_at_any_length() -> None:
    top = tuple((token, -float(token)) for token in range(1, 21))
    likely = [TokenLogprobs(-1.0, 1, top)] * MAX_BEAM_WIDTH
    search = BeamSearch.of(BeamSearchParams(MAX_BEAM_WIDTH, 1 << 20), frozenset())
    counted, steps = {}, 2000
    for length in range(steps):
        begun = search
        if length in (10, steps - 1):
            counted[length] = operations(lambda: begun.after(likely))  # noqa: B023
        search = begun.after(likely[: len(begun.running)])
    assert counted[10] == counted[steps - 1]
    assert len(search.running[0].token_ids) == len(search.running[0].logprobs) == steps
