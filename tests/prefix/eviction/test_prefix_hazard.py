"""The learned rule in the compiled core: the same counts, classes and victims as in Python."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.memory import Eviction, create_core
from kvell.pages.audit import audit
from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.prefix import _core
from kvell.prefix.eviction import hazard
from kvell.prefix.eviction.hazard import (
    AGES,
    BOUNDS,
    CHUNK_TOKENS,
    NUM_CLASSES,
    REFIT_REQUESTS,
    FittedHazard,
    Floats,
    age_bounds,
    capacity_tokens,
)
from tests.depth import machine, many
from tests.models.cases import covering, some_fast
from tests.oracle.eviction.hazard_fit import fit
from tests.oracle.eviction.hazard_rule import LearnedHazard
from tests.pages.pools import group, state
from tests.prefix.core.lockstep import LockStep, Pair, ints, pool_of

Counts = tuple[list[float], list[float], list[float], int]


def eager(entered: Floats, returned: Floats, events: Floats, requests: int) -> FittedHazard:
    """Believes what it has seen at once, so that a few requests stir the order of classes."""
    rates = (returned.reshape(NUM_CLASSES, AGES) + 0.01) / (
        entered.reshape(NUM_CLASSES, AGES) + 0.1
    )
    index = np.minimum.accumulate(rates + 0.001 * events[:, None], axis=1)
    return FittedHazard(index, 0.75, requests + 2)


def eager_rule() -> LearnedHazard:
    return LearnedHazard(40, chunk_tokens=2, first_refit=1, learn=eager)


class LearningLockStep(LockStep):
    """The machine of both cores, with a rule whose mind changes all the time."""

    def pair(self, layout: Layout) -> Pair:
        return Pair(layout, eager_rule)


TestLearningLockStep = LearningLockStep.TestCase
TestLearningLockStep.settings = machine(weight=0.5)


def noting(seen: list[Counts]) -> Callable[[Floats, Floats, Floats, int], FittedHazard]:
    def learn(entered: Floats, returned: Floats, events: Floats, requests: int) -> FittedHazard:
        seen.append(
            (entered.ravel().tolist(), returned.ravel().tolist(), events.tolist(), requests)
        )
        return eager(entered, returned, events, requests)

    return learn


def counts_of(seed: int) -> tuple[Floats, Floats, Floats]:
    """Many or few of everything; much of it was never seen, at most ninety-nine in a hundred."""
    draw = np.random.default_rng(seed)
    shape, scale = (NUM_CLASSES, AGES), 10 ** draw.uniform(-2, 4)
    entered = scale * draw.random(shape) * (draw.random(shape) < draw.uniform(0.01, 1))
    returned = entered * draw.random(shape) * (draw.random(shape) < draw.random())
    events = np.floor(draw.random(NUM_CLASSES) * draw.integers(1, 500))
    return entered, returned, events * (draw.random(NUM_CLASSES) < draw.random())


def compiled_fit(entered: Floats, returned: Floats, events: Floats) -> Floats:
    told = _core.fit(entered.tobytes(), returned.tobytes(), events.tobytes(), BOUNDS)
    return np.frombuffer(told)


@many()
@given(st.integers(0, 2**32))
def test_both_fits_say_the_same(seed: int) -> None:
    counts = counts_of(seed)
    expected = fit(*counts)
    index = compiled_fit(*counts).reshape(expected.shape)
    np.testing.assert_allclose(index, expected, rtol=1e-9, atol=1e-13)
    assert (np.diff(index, axis=1) <= 0).all(), "the older is worth no more"
    assert len(np.unique(index)) > AGES, "something to tell apart"


def test_both_fits_say_the_same_when_nothing_was_seen() -> None:
    nothing = np.zeros((NUM_CLASSES, AGES)), np.zeros((NUM_CLASSES, AGES)), np.zeros(NUM_CLASSES)
    expected = fit(*nothing)
    index = compiled_fit(*nothing).reshape(expected.shape)
    np.testing.assert_allclose(index, expected, rtol=1e-9, atol=1e-13)
    assert (index == index[0]).all(), "no class is told from another"


def test_a_fit_of_counts_of_another_size_is_refused() -> None:
    entered, returned, events = counts_of(1)
    with pytest.raises(ValueError, match="counts of another size"):
        compiled_fit(entered[1:], returned, events)
    with pytest.raises(ValueError, match="bounds of another size"):
        _core.fit(entered.tobytes(), returned.tobytes(), events.tobytes(), BOUNDS[1:])


def test_what_is_learned_is_the_fit_of_the_counts() -> None:
    counts = counts_of(2)
    learned = hazard.learn(*counts, 100)
    np.testing.assert_allclose(learned.index, fit(*counts), rtol=1e-9, atol=1e-13)
    assert learned.next_refit == 100 + hazard.REFIT_REQUESTS


MIXES: list[list[GroupSpec]] = [
    [group(2, 3)],
    [group(2, 5), group(2, 2, window=6)],
    [group(2, 4), state(1, 2)],
]


def conversations(both: Pair, seed: int, requests: int, talks: int = 12) -> None:
    """Talks of many turns that come in any order, with pauses, hints and answers."""
    draw = np.random.default_rng(seed)
    step = 0
    for _ in range(requests):
        step += int(draw.integers(0, 9)) ** 2
        both("begin_step", step)
        talk, turns = int(draw.integers(0, talks)), int(draw.integers(1, 6))
        tokens = [talk] * 4 + [turn for turn in range(turns) for _ in range(3)]
        handle = both("open", ints(*tokens), "")
        hint = (None, None, True, False)[int(draw.integers(0, 4))]
        both("claim", handle, len(tokens) + 4, will_return=hint)
        until = both("largest", handle, len(tokens))
        both("grow", ints(handle), ints(until))
        both("checkpoint", ints(handle), ints(until))
        both("advance", ints(handle), ints(until))
        answer = int(draw.integers(0, 5)) if until == len(tokens) else 0
        for token in range(answer):
            both("append", ints(handle), ints(100 + token))
        both("close", handle, returns=bool(draw.random() < 0.1))
        both.check()


@covering(
    {
        "groups": [
            pytest.param(mix, id=name)
            for mix, name in zip(MIXES, ("full", "window", "state"), strict=True)
        ],
        "seed": range(3),
    },
    together=1,
)
def test_both_count_the_same_to_the_bit(groups: list[GroupSpec], seed: int) -> None:
    seen: list[list[Counts]] = []

    def rule() -> LearnedHazard:
        seen.append([])
        return LearnedHazard(60, chunk_tokens=2, first_refit=1, learn=noting(seen[-1]))

    both = Pair(pool_of(20, *groups), rule)
    conversations(both, seed, 120)
    assert len(seen[0]) > 30
    assert seen[0] == seen[1]
    assert sum(seen[0][-1][1]) > 0, "somebody returned"
    assert sum(both.check().evicted_pages) > 0


@pytest.mark.parametrize("capacity_tokens", some_fast([60, 400, 4000], [60]))
def test_both_remember_and_forget_the_same_of_many(capacity_tokens: int) -> None:
    """More chunks than a table of keys begins with, and, but for the last, than it may keep."""
    seen: list[list[Counts]] = []

    def rule() -> LearnedHazard:
        seen.append([])
        return LearnedHazard(capacity_tokens, chunk_tokens=2, first_refit=9, learn=noting(seen[-1]))

    both = Pair(pool_of(20, group(2, 3)), rule)
    conversations(both, 5, 500, talks=400)
    assert len(seen[0]) > 200
    assert seen[0] == seen[1]


def test_a_preempted_request_has_not_ended() -> None:
    seen: list[Counts] = []
    rule = LearnedHazard(60, chunk_tokens=2, first_refit=1, learn=noting(seen))
    both = Pair(pool_of(20, group(2, 3)), lambda: rule)
    for returns in (True, True, False):
        handle = both("open", ints(*range(8)), "")
        both("claim", handle, 8)
        both("grow", ints(handle), ints(8))
        both("advance", ints(handle), ints(8))
        both("close", handle, returns=returns)
        both.check()
        assert len(seen) == (0 if returns else 2), "each core once"


def test_a_lease_that_nobody_claims_is_no_request() -> None:
    seen: list[Counts] = []
    rule = LearnedHazard(60, chunk_tokens=2, first_refit=1, learn=noting(seen))
    both = Pair(pool_of(20, group(2, 3)), lambda: rule)
    lease = both("open", ints(*range(8)), "", 5)
    both("grow", ints(lease), ints(8))
    both("advance", ints(lease), ints(8))
    both("close", lease)
    assert not seen


def test_an_index_of_another_size_is_refused() -> None:
    def learn(entered: Floats, returned: Floats, events: Floats, requests: int) -> FittedHazard:
        return FittedHazard(entered[:3], 1.0, requests + 1)

    rule = LearnedHazard(60, chunk_tokens=2, first_refit=1, learn=learn)
    core = Pair(pool_of(20, group(2, 3)), lambda: rule).cores[1]
    handle = core.open(ints(*range(8)), "")
    core.claim(handle, 8)
    core.grow(ints(handle), ints(8))
    core.advance(ints(handle), ints(8))
    with pytest.raises(ValueError, match="index of another size"):
        core.close(handle)


def test_ages_grow_by_about_the_square_root_of_two() -> None:
    bounds = age_bounds()
    assert bounds[:6].tolist() == [0, 1, 2, 3, 4, 6]
    assert len(bounds) == AGES + 1
    assert np.all(bounds[10:] / bounds[9:-1] < 1.5)
    assert np.all(np.diff(bounds) > 0)


PAGE = CHUNK_TOKENS // 4


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.STATE])
def test_a_pool_keeps_about_so_many_tokens(kind: GroupKind) -> None:
    layout = pool_of(3, group(PAGE, 4) if kind is GroupKind.FULL else state(1, 4))
    (spec,) = layout.groups
    pages = layout.pool_bytes // spec.page_stride_bytes
    assert capacity_tokens(layout) == pages * spec.page_tokens


class Server:
    """Prompts one after the other; each takes a step, and answers with nothing."""

    def __init__(self, layout: Layout, eviction: Eviction) -> None:
        self.layout, self.step = layout, 0
        self.core = create_core(layout, eviction)

    def serve(self, tokens: list[int], *, will_return: bool | None = None) -> int:
        self.step += 1
        self.core.begin_step(self.step)
        handle = self.core.open(ints(*tokens), "")
        self.core.claim(handle, len(tokens), will_return=will_return)
        served, _ = self.core.grow(ints(handle), ints(len(tokens)))
        assert served == 1
        self.core.advance(ints(handle), ints(len(tokens)))
        hit = self.core.hit_tokens(handle)
        self.core.close(handle)
        assert audit(self.layout, self.core.snapshot()) == []
        return hit


def later_hits(eviction: Eviction, *, hinted: bool) -> int:
    """Every other conversation returns after twenty requests; there is room for fifteen."""
    server, hits = Server(pool_of(30, group(PAGE, 4)), eviction), 0
    for turn in range(4 * REFIT_REQUESTS):
        again = turn % 2 == 0 and turn % 40 >= 20
        comes = turn % 2 == 0 and not again
        talk = turn - 20 if again else turn
        tokens = [talk + 1] * 2 * CHUNK_TOKENS
        hit = server.serve(tokens, will_return=comes if hinted else None)
        hits += hit if turn >= 2 * REFIT_REQUESTS else 0
    return hits


def test_a_request_that_will_not_return_is_evicted_first() -> None:
    assert later_hits("lru", hinted=True) == 0
    hits = later_hits("hazard", hinted=True)
    assert hits > 0.9 * REFIT_REQUESTS / 2 * (2 * CHUNK_TOKENS - 1)
    assert hits >= later_hits("hazard", hinted=False)
