"""The learned rule in a memory core: least recently used until it knows better, and then better."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.audit import audit
from kvell.pages.layout import GroupKind, Layout
from kvell.pages.snapshot import SHARED, PoolSnapshot
from kvell.prefix.eviction.hazard import CHUNK_TOKENS, NUM_CLASSES, REFIT_REQUESTS, capacity_tokens
from tests.depth import few, machine
from tests.oracle.core.reference import ReferenceCore
from tests.oracle.eviction.checkpoints import Usefulness
from tests.oracle.eviction.evictor import (
    NORMAL,
    SPARE,
    Ending,
    EvictionRule,
    Evictor,
    LeastRecentlyUsed,
    class_at,
)
from tests.oracle.eviction.hazard import HazardTable, Run, class_of
from tests.oracle.eviction.hazard_rule import RUNNING_STEPS, WORTH_STEPS, LearnedHazard
from tests.oracle.index.changes import IndexChanges
from tests.oracle.index.radix import RadixTree
from tests.oracle.pages.pool import PagePool
from tests.oracle.placement.placement import Placer
from tests.pages.pools import group, pool_of, state
from tests.prefix.core.test_prefix_core_machine import CoreMachine
from tests.prefix.rehearsal import Rehearsal
from tests.prefix.story import ints

FIRST_ONCE = class_of(1, None, 0)
PAGE = CHUNK_TOKENS // 4
CHUNK_PAGES = CHUNK_TOKENS // PAGE


class Taught(HazardTable):
    """Knows from the start: one class is worth nothing, of the rest only age counts."""

    worthless = -1

    def value(self, eviction_class: int, age: int) -> float:
        return 0.0 if eviction_class == self.worthless else 1 / (1 + age)


def ruled_by(table: HazardTable) -> LearnedHazard:
    rule = LearnedHazard(1_000)
    rule._table = table
    return rule


class Server:
    """Prompts one after the other; each takes a step, and answers with nothing."""

    def __init__(self, layout: Layout, rule: EvictionRule | None = None) -> None:
        self.layout, self.step = layout, 0
        self.core = ReferenceCore(layout, rule)

    def serve(self, tokens: list[int], *, will_return: bool | None = None) -> int:
        """Tokens that hit."""
        self.step += 1
        self.core.begin_step(self.step)
        handle = self.core.open(ints(tokens), "")
        self.core.claim(handle, len(tokens), will_return=will_return)
        served, _ = self.core.grow(ints([handle]), ints([len(tokens)]))
        assert served == 1
        self.core.advance(ints([handle]), ints([len(tokens)]))
        hit = self.core.hit_tokens(handle)
        self.core.close(handle)
        assert audit(self.layout, self.core.snapshot()) == []
        return hit


def cached(state: PoolSnapshot) -> object:
    """What is where, whatever the keys are."""
    return sorted((e.group, e.page, e.end) for e in state.index), state.refs, state.group


def text(talk: int, chunks: int) -> list[int]:
    return [talk] * (chunks * CHUNK_TOKENS)


talks = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=20)
layouts = st.sampled_from(
    [
        pool_of(5, group(PAGE, CHUNK_PAGES)),
        pool_of(12, group(PAGE, 2)),
        pool_of(17, group(PAGE, 2), group(PAGE, 2)),
        pool_of(18, group(PAGE, 2), group(PAGE, 2, 2 * PAGE)),
    ]
)


@few()
@given(layouts, talks, st.booleans())
def test_where_all_classes_are_alike_it_is_the_least_recently_used(
    layout: Layout, said: list[tuple[int, int]], learned: bool
) -> None:
    rule = ruled_by(Taught(1_000) if learned else HazardTable(1_000))
    plain, ruled = Server(layout), Server(layout, rule)
    for talk, chunks in said:
        assert plain.serve(text(talk, chunks)) == ruled.serve(text(talk, chunks))
        assert cached(plain.core.snapshot()) == cached(ruled.core.snapshot())


@few()
@given(talks, st.integers(0, NUM_CLASSES - 1))
def test_states_and_windows_stand_any_order_of_classes(
    said: list[tuple[int, int]], worthless: int
) -> None:
    table = Taught(1_000)
    table.worthless = worthless
    layout = pool_of(30, group(PAGE, 2), state(1, 2), group(PAGE, 2, 2 * PAGE))
    server = Server(layout, ruled_by(table))
    for talk, chunks in said:
        server.serve(text(talk, chunks))
        server.step += talk


def later_hits(rule: EvictionRule | None, *, hinted: bool) -> int:
    """Every other conversation returns after twenty requests; there is room for fifteen."""
    server, hits = Server(pool_of(30, group(PAGE, CHUNK_PAGES)), rule), 0
    for turn in range(4 * REFIT_REQUESTS):
        again = turn % 2 == 0 and turn % 40 >= 20
        comes = turn % 2 == 0 and not again
        talk = turn - 20 if again else turn
        hit = server.serve(text(talk + 1, 2), will_return=comes if hinted else None)
        hits += hit if turn >= 2 * REFIT_REQUESTS else 0
    return hits


def test_who_says_that_he_will_not_return_goes_first() -> None:
    capacity = 30 * CHUNK_TOKENS
    assert later_hits(None, hinted=True) == 0
    told = later_hits(LearnedHazard(capacity), hinted=True)
    assert told > 0.9 * REFIT_REQUESTS / 2 * (2 * CHUNK_TOKENS - 1)
    assert told >= later_hits(LearnedHazard(capacity), hinted=False)


def test_what_is_younger_stays_beside_what_goes_though_worth_no_more() -> None:
    """As with the least recently used: worth is equal before anything is learned."""
    rule = LearnedHazard(1_000)
    old, young = rule.key(NORMAL, 1, 8), rule.key(NORMAL, 2, 8)
    evictor = Evictor(1, rule)
    pool = PagePool(pool_of(1, group(4, 3)), evictor)
    evictor.watch(pool)
    placer = Placer(pool, evictor, RadixTree(1), IndexChanges(), Usefulness())
    large = pool.claim_large(0, SHARED)
    assert large is not None
    pages = [pool.take(large) for _ in range(3)]
    for page, key in zip(pages, (old, young), strict=False):
        pool.index(0, page, key)
        pool.release(0, page, key)
    assert placer._beside(0, pages[0]) == [pages[0]]
    assert placer._beside(0, pages[1]) == pages[:2]


# ------------------------------------------------------------------------ the rule


@given(
    st.sampled_from([SPARE, NORMAL]),
    st.integers(0, 99),
    st.integers(1, 1 << 20),
    st.integers(FIRST_ONCE, NUM_CLASSES - 1),
)
def test_a_key_tells_its_class(rank: int, time: int, length: int, number: int) -> None:
    rule = LearnedHazard(1_000)
    key = rule.key(rank, time, length, number)
    assert rule.eviction_class(key) == (number if rank == NORMAL else 0)
    assert rule.place(key, 100) == (rank, 0.0, time, -length)
    assert rule.place(key, 100) < rule.limit(NORMAL, 100)


def test_what_a_running_request_leaves_is_of_the_most_worth_for_a_while() -> None:
    rule = ruled_by(Taught(10))
    running, ended = (rule.class_before(100, True, is_running=one) for one in (True, False))
    assert running < FIRST_ONCE
    assert ended == class_of(1, True, 100)
    young, old = (rule.key(NORMAL, time, 8, running) for time in (RUNNING_STEPS, RUNNING_STEPS - 1))
    now = 2 * RUNNING_STEPS
    assert rule.place(young, now)[1] == inf
    assert not rule.place(young, now) < rule.limit(NORMAL, now), "it gives way to nothing kept"
    as_ended = rule.key(NORMAL, RUNNING_STEPS - 1, 8, ended)
    assert rule.place(old, now) == rule.place(as_ended, now)


def test_ages_are_looked_at_now_and_then() -> None:
    rule = ruled_by(Taught(10))
    key = rule.key(NORMAL, 3 * WORTH_STEPS - 1, 8, FIRST_ONCE)
    worths = [rule.place(key, now)[1] for now in range(3 * WORTH_STEPS - 1, 6 * WORTH_STEPS)]
    assert worths[:1] == [1.0]
    assert len(set(worths)) == 4
    assert worths[1:] == sorted(worths[1:], reverse=True)
    assert all(
        len(set(worths[1 + i : 1 + i + WORTH_STEPS])) == 1
        for i in range(0, 3 * WORTH_STEPS, WORTH_STEPS)
    )


def test_an_end_is_no_earlier_than_was_expected() -> None:
    assert [LearnedHazard(10).ended_at(5, then) for then in (3, 9)] == [5, 9]
    assert [LeastRecentlyUsed().ended_at(5, then) for then in (3, 9)] == [5, 5]


def test_ranks_come_before_worth() -> None:
    rule = ruled_by(Taught(10))
    spare, normal = rule.key(SPARE, 99, 8, 70), rule.key(NORMAL, 1, 8, 70)
    assert rule.place(spare, 100) < rule.place(normal, 100)
    assert not rule.place(normal, 100) < rule.limit(SPARE, 100)


def ending(tokens: int) -> Ending:
    return Ending(np.zeros(tokens, np.int32), "", 0, None)


def test_classes_are_told_in_tokens_by_whole_chunks() -> None:
    rule = LearnedHazard(10_000)
    (run,) = rule.on_access(ending(5 * CHUNK_TOKENS + 7), 1)
    assert run.end == 5 * CHUNK_TOKENS
    assert run.eviction_class == class_of(1, None, 0)
    first, rest = rule.on_access(ending(6 * CHUNK_TOKENS), 2)
    assert (first.end, rest.end) == (5 * CHUNK_TOKENS, 6 * CHUNK_TOKENS)
    assert rest.eviction_class == class_of(2, None, 0)
    assert not rule.on_access(ending(CHUNK_TOKENS - 1), 3)


def test_what_follows_the_last_chunk_is_of_its_class() -> None:
    runs = [Run(10, 3), Run(20, 5)]
    assert [class_at(runs, token, 9) for token in (1, 10, 11, 20, 21)] == [3, 3, 5, 5, 5]
    assert class_at((), 1, 9) == 9


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.STATE])
def test_a_pool_keeps_about_so_many_tokens(kind: GroupKind) -> None:
    layout = pool_of(3, group(PAGE, 4) if kind is GroupKind.FULL else state(1, 4))
    (spec,) = layout.groups
    pages = layout.pool_bytes // spec.page_stride_bytes
    assert capacity_tokens(layout) == pages * spec.page_tokens


class Fickle(HazardTable):
    """Worth as little foreseeable as can be, but of one class never more for a greater age."""

    def value(self, eviction_class: int, age: int) -> float:
        return (eviction_class * 7 % 5 + 1) / (1 + age // (1 + eviction_class % 3))


class Stirred(CoreMachine):
    """The machine of the least recently used core, with a rule of many classes."""

    @property
    def rehearsal(self) -> Rehearsal:
        return self._rehearsal

    @rehearsal.setter
    def rehearsal(self, made: Rehearsal) -> None:
        made.core = ReferenceCore(made.core.layout, ruled_by(Fickle(1_000)))
        self._rehearsal = made


TestStirred = Stirred.TestCase
TestStirred.settings = machine(weight=0.3)
