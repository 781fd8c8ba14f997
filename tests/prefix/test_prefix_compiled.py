"""The compiled core beside the Python one: every answer and every state is the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvell.pages.audit import audit
from kvell.pages.layout import GroupSpec, Layout
from kvell.pages.snapshot import IndexEntry, PoolSnapshot
from kvell.prefix.compiled import CompiledCore
from kvell.prefix.core import ReferenceCore
from kvell.prefix.interface import MemoryCore
from tests.pages.pools import Chunk, confined, group, literal


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)


def pool_of(num_large: int, *groups: GroupSpec) -> Layout:
    return Layout(groups, 64, num_large)


def by_value(state: PoolSnapshot) -> PoolSnapshot:
    """The index has no order of its own."""

    def place(entry: IndexEntry) -> tuple[int, int]:
        return entry.group, entry.page

    return replace(state, index=tuple(sorted(state.index, key=place)))


def same(left: object, right: object) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


class Pair:
    """Both implementations behind one call that compares what they say."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.cores: tuple[MemoryCore, MemoryCore] = (ReferenceCore(layout), CompiledCore(layout))

    def __call__(self, name: str, *args: object, **options: object) -> Any:
        expected, answer = (getattr(core, name)(*args, **options) for core in self.cores)
        assert same(expected, answer), (name, args, expected, answer)
        return expected

    def check(self) -> PoolSnapshot:
        expected, state = (by_value(core.snapshot()) for core in self.cores)
        assert state == expected
        self("totals")
        assert audit(self.layout, state) == []
        return state


groups_of_any_kind = st.lists(
    st.builds(
        group,
        st.sampled_from([1, 2, 3, 4, 6]),
        st.sampled_from([1, 2, 3, 5, 70]),
        st.sampled_from([0, 0, 1, 3, 7, 12, Chunk(1), Chunk(5), Chunk(8), Chunk(12)]),
    ),
    min_size=1,
    max_size=3,
)
few_letters = st.lists(st.integers(0, 1), min_size=1, max_size=36)


class LockStep(RuleBasedStateMachine):
    """Tiny pools and two letters: evictions, refusals and split edges all the time."""

    @initialize(
        groups=groups_of_any_kind,
        num_large=st.integers(1, 10),
        sharing=st.sampled_from([replace, replace, literal, confined]),
    )
    def start(
        self, groups: list[GroupSpec], num_large: int, sharing: Callable[[Layout], Layout]
    ) -> None:
        self.both = Pair(sharing(pool_of(num_large, *groups)))
        self.step = 0
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.leases: dict[int, tuple[int, int]] = {}

    def some(self, chosen: int) -> list[int]:
        """Running requests by the bits of a number, the youngest first if it is odd."""
        handles = [h for i, h in enumerate(sorted(self.known)) if chosen >> i % 6 & 1]
        return handles[::-1] if chosen % 2 else handles

    def one(self, chosen: int) -> int:
        return sorted(self.known)[chosen % len(self.known)]

    def running(self, handle: int, num_tokens: int, expected: int) -> None:
        self.both("claim", handle, expected)
        self.known[handle] = num_tokens
        self.computed[handle] = self.both("hit_tokens", handle)

    @rule(steps=st.integers(0, 2))
    def next_step(self, steps: int) -> None:
        self.step += steps
        self.both("begin_step", self.step)
        self.leases = {h: v for h, v in self.leases.items() if v[0] >= self.step}

    @rule(
        tokens=few_letters,
        root=st.sampled_from(["", "salt"]),
        lease=st.sampled_from([None, None, 0, 2]),
        extra=st.integers(0, 30),
    )
    def open(self, tokens: list[int], root: str, lease: int | None, extra: int) -> None:
        prompt = ints(*tokens)
        hit = self.both("peek", prompt, root)
        until = None if lease is None else self.step + lease
        handle = self.both("open", prompt, root, until)
        assert self.both("hit_tokens", handle) == hit
        if until is None:
            self.running(handle, len(tokens), len(tokens) + extra)
        else:
            self.leases[handle] = until, len(tokens)

    @precondition(lambda self: self.leases)
    @rule(extra=st.integers(0, 30))
    def claim_a_lease(self, extra: int) -> None:
        handle = min(self.leases)
        _, num_tokens = self.leases.pop(handle)
        self.running(handle, num_tokens, num_tokens + extra)

    @precondition(lambda self: self.known)
    @rule(chosen=st.integers(1, 63), chunk=st.integers(1, 20), compute=st.booleans())
    def prefill_or_decode(self, chosen: int, chunk: int, compute: bool) -> None:
        handles = self.some(chosen)
        until = [min(self.known[h], self.computed[h] + chunk) for h in handles]
        served, _ = self.both("grow", ints(*handles), ints(*until))
        if compute:
            self.both("advance", ints(*handles[:served]), ints(*until[:served]))
            self.computed.update(zip(handles[:served], until, strict=False))

    @precondition(lambda self: self.known)
    @rule(chosen=st.integers(1, 63), token=st.integers(0, 1), times=st.integers(1, 3))
    def append(self, chosen: int, token: int, times: int) -> None:
        ready = [h for h in self.some(chosen) if self.computed[h] == self.known[h]] * times
        self.both("append", ints(*ready), np.full(len(ready), token, np.int32))
        for handle in ready:
            self.known[handle] += 1

    @precondition(lambda self: self.known)
    @rule(chosen=st.integers(0, 63), renew=st.booleans())
    def close(self, chosen: int, renew: bool) -> None:
        handle = self.one(chosen)
        self.both("close", handle, renew=renew)
        del self.known[handle], self.computed[handle]

    @precondition(lambda self: self.known)
    @rule(chosen=st.integers(0, 63), until=st.integers(0, 60), chunk=st.integers(1, 9))
    def look(self, chosen: int, until: int, chunk: int) -> None:
        handle, others = self.one(chosen), self.some(chosen)
        self.both("largest", handle, until)
        self.both("held_pages", handle)
        lengths = ints(*(self.known[other] + 3 for other in others))
        self.both("fits", handle, until, chunk, ints(*others), lengths)

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "both"):
            self.both.check()

    def teardown(self) -> None:
        if not hasattr(self, "both"):
            return
        for handle in self.known:
            self.both("close", handle)
        self.both("begin_step", self.step + 3)
        state = self.both.check()
        assert not state.holders
        assert not any(state.used)


FEW = settings(
    max_examples=240,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

TestLockStep = LockStep.TestCase
TestLockStep.settings = FEW


class LongLockStep(LockStep):
    """The same for minutes."""


TestLongLockStep = pytest.mark.long(LongLockStep.TestCase)
TestLongLockStep.settings = settings(FEW, max_examples=5000)


def filled(both: Pair, tokens: list[int], root: str = "") -> int:
    """A request whose whole prompt is computed."""
    handle: int = both("open", ints(*tokens), root)
    both("claim", handle, len(tokens))
    served, _ = both("grow", ints(handle), ints(len(tokens)))
    assert served == 1
    both("advance", ints(handle), ints(len(tokens)))
    return handle


def test_a_call_that_needs_no_page_changes_nothing_and_returns_no_rows() -> None:
    both = Pair(pool_of(4, group(4, 2)))
    handle = filled(both, [1, 2, 3])
    before = both.check()
    served, rows = both("grow", ints(handle), ints(4))
    assert served == 1
    assert rows.shape == (0, 4)
    assert both.check() == before


def test_an_edge_is_split_where_prefixes_part_and_pages_keep_their_sides() -> None:
    both = Pair(pool_of(20, group(2, 3), group(4, 2)))
    long = list(range(40))
    both("close", filled(both, long))
    both("close", filled(both, [*long[:12], 99, 98, 97, 96]))
    state = both.check()
    assert state.num_nodes == 4
    assert {(e.node_start, e.node_end) for e in state.index} == {(0, 12), (12, 40), (12, 16)}
    assert both("peek", ints(*long, 7), "") == 40
    assert both("peek", ints(*long[:12], 99, 98, 97, 96, 7), "") == 16


def test_a_decode_publishes_across_the_end_of_its_prompt() -> None:
    both = Pair(pool_of(8, group(4, 2)))
    handle = filled(both, [5, 6, 7, 8, 9, 10])
    both("append", ints(handle, handle), ints(11, 12))
    both("grow", ints(handle), ints(8))
    both("advance", ints(handle), ints(8))
    assert both("peek", ints(5, 6, 7, 8, 9, 10, 11, 12, 0), "") == 8
    assert both("peek", ints(5, 6, 7, 8, 9, 10, 11, 13, 0), "") == 4


def test_names_that_nothing_is_kept_under_are_forgotten() -> None:
    both = Pair(pool_of(2, group(2, 1)))
    assert both("peek", ints(1, 2, 3), "never opened") == 0
    assert both.check().num_nodes == 0
    both("close", filled(both, [1, 2, 3, 4], "first"))
    both("close", filled(both, [5, 6, 7, 8], "second"))
    assert both("peek", ints(1, 2, 3), "first") == 0
    assert both.check().num_nodes == 2


def test_a_lease_is_given_back_after_its_step_and_renews_nothing() -> None:
    both = Pair(pool_of(4, group(2, 2)))
    both("begin_step", 5)
    both("close", filled(both, [1, 2, 3, 4]))
    keys = both.check().keys
    lease = both("open", ints(1, 2, 3, 4, 5), "", 7)
    assert both("hit_tokens", lease) == 4
    both("begin_step", 7)
    assert len(both.check().holders) == 1
    both("begin_step", 8)
    assert not both.check().holders
    assert both.check().keys == keys


def test_no_request_of_a_call_takes_the_large_page_that_a_later_one_needs() -> None:
    """The first must evict a page: every whole large page is wanted in the other group."""
    both = Pair(pool_of(14, group(4, 2), group(1, 1)))
    first, gone = filled(both, [1] * 4), filled(both, [2] * 4)
    both("close", gone)
    second, third = filled(both, [3]), filled(both, [4])
    state = both.check()
    assert (state.whole, state.partial, state.num_empty_large) == (6, (1, 0), 2)
    served, rows = both("grow", ints(first, second, third), ints(5, 4, 3))
    assert served == 3
    assert rows[:, :2].tolist() == [[0, 0], [0, 1], *[[1, 1]] * 3, *[[2, 1]] * 2]
    assert both.check().rungs["evict_page"] == 1


def test_a_chunk_ends_and_all_its_pages_are_left_behind_at_once() -> None:
    both = Pair(pool_of(6, group(4, 2), group(4, 2, Chunk(8))))
    handle = filled(both, list(range(7)))
    assert both.check().holders[0].groups == ((0, (0, 1)), (0, (2, 3)))
    both("append", ints(handle), ints(7))
    both("advance", ints(handle), ints(8))
    assert both.check().holders[0].groups == ((0, (0, 1)), (2, ()))
    assert both("peek", ints(*range(9)), "") == 8


def test_more_pages_than_a_machine_word_in_one_large_page() -> None:
    both = Pair(pool_of(2, group(1, 150)))
    handle = filled(both, [7] * 149)
    state = both.check()
    assert state.empty_masks[0].bit_count() == 1
    assert state.empty_masks[0].bit_length() == 150
    both("close", handle)
    assert both.check().cached[0] == 149


@pytest.fixture
def core() -> CompiledCore:
    return CompiledCore(pool_of(4, group(4, 2)))


def by_name(name: str, *args: object) -> Callable[[CompiledCore], object]:
    return lambda core: getattr(core, name)(*args)


@pytest.mark.parametrize(
    "call",
    [
        by_name("claim", 1, 5),
        by_name("hit_tokens", 1),
        by_name("grow", ints(1), ints(4)),
        by_name("largest", 1, 5),
        by_name("held_pages", 1),
        by_name("fits", 1, 4, 1, ints(), ints()),
        by_name("append", ints(1), ints(4)),
        by_name("advance", ints(1), ints(4)),
        by_name("close", 1),
    ],
)
def test_a_handle_that_is_not_open_is_a_key_error(
    core: CompiledCore, call: Callable[[CompiledCore], object]
) -> None:
    with pytest.raises(KeyError, match="1"):
        call(core)
    with pytest.raises(KeyError, match="1"):
        call(ReferenceCore(core.layout))  # type: ignore[arg-type]


def test_steps_never_go_back(core: CompiledCore) -> None:
    core.begin_step(3)
    with pytest.raises(ValueError, match="steps only grow: 2 after 3"):
        core.begin_step(2)


@pytest.mark.parametrize("name", ["grow", "append", "advance"])
def test_arrays_of_one_call_are_equally_long(core: CompiledCore, name: str) -> None:
    handle = core.open(ints(1, 2), "")
    with pytest.raises(ValueError, match="different lengths"):
        getattr(core, name)(ints(handle), ints(1, 2))


def test_a_call_that_raises_has_changed_nothing(core: CompiledCore) -> None:
    handle = core.open(ints(1, 2, 3, 4, 5), "")
    core.grow(ints(handle), ints(4))
    before = core.snapshot()
    for name in ("grow", "append", "advance"):
        with pytest.raises(KeyError):
            getattr(core, name)(ints(handle, 99), ints(4, 4))
    assert core.snapshot() == before
    assert core.open(ints(1, 2, 3, 4, 5), "") == handle + 1


def test_tokens_cannot_be_computed_beyond_pages_or_known_tokens(core: CompiledCore) -> None:
    handle = core.open(ints(1, 2, 3), "")
    with pytest.raises(ValueError, match="beyond the pages"):
        core.advance(ints(handle), ints(1))
    core.grow(ints(handle), ints(8))
    with pytest.raises(ValueError, match="beyond those known"):
        core.advance(ints(handle), ints(4))
    assert core.snapshot().holders[0].computed == 0


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4, 5], np.arange(1, 6), np.arange(2, 12, 2) // 2])
def test_any_integers_that_numpy_understands_are_tokens(core: CompiledCore, tokens: Any) -> None:
    handle = core.open(ints(1, 2, 3, 4, 5), "")
    core.grow(ints(handle), ints(4))
    core.advance(ints(handle), ints(4))
    assert core.peek(tokens, "") == 4


@pytest.mark.parametrize("tokens", [np.zeros((2, 2), np.int32), "text"])
def test_anything_else_is_refused(core: CompiledCore, tokens: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        core.peek(tokens, "")


def test_a_pool_of_a_terabyte_starts_empty_and_serves() -> None:
    core = CompiledCore(pool_of(1 << 18, group(16, 64)))
    handle = core.open(np.arange(100, dtype=np.int32), "")
    served, rows = core.grow(ints(handle), ints(100))
    assert served == 1
    assert rows[:, 3].tolist() == list(range(7))


def test_shares_larger_than_the_pool_are_refused() -> None:
    layout = replace(pool_of(4, group(16, 4), group(16, 4)), quota_large_pages=(3, 2))
    for make in (CompiledCore, ReferenceCore):
        with pytest.raises(ValueError, match="shares of 5 large pages in a pool of 4"):
            make(layout)


def test_more_pages_than_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="more pages than 32 bits"):
        CompiledCore(pool_of(1 << 25, group(16, 65)))
