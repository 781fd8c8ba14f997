"""The compiled core beside the Python one: every answer and every state is the same."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.core.compiled import CompiledCore
from tests.depth import machine
from tests.oracle.core.reference import ReferenceCore
from tests.oracle.index.seen import empty_larges
from tests.pages.pools import Chunk, confined, dropping, group, images, state
from tests.prefix.core.lockstep import (
    LockStep,
    Pair,
    filled,
    ints,
    pool_of,
    shown,
    sized,
    with_image,
)


@pytest.fixture
def core() -> CompiledCore:
    return CompiledCore(pool_of(4, group(4, 2)))


TestLockStep = LockStep.TestCase
TestLockStep.settings = machine()


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
    assert both("peek", ints(5, 6, 7, 8, 9, 10, 11, 13, 0), "") == 7


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
    assert (state.whole, state.partial, empty_larges(state)) == (6, (1, 0), 2)
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


def test_a_prefix_that_ends_inside_a_page_is_resumed_by_a_copy() -> None:
    both = Pair(pool_of(8, group(4, 2), group(6, 2, 7)))
    both("close", filled(both, [1, 2, 3, 4, 5, 6, 7]))
    handle = both("open", ints(1, 2, 3, 4, 5, 6, 7, 8), "")
    assert both("hit_tokens", handle) == 7
    assert len(both.check().holders[0].others) == 2
    both("grow", ints(handle), ints(8))
    assert both("copies")[:, [0, 1]].tolist() == [[handle, 0], [handle, 1]]
    assert both("copies").shape == (0, 4)
    both("advance", ints(handle), ints(8))
    assert both.check().holders[0].others == ()


def test_first_tokens_of_a_page_are_found_where_a_prompt_parts() -> None:
    both = Pair(pool_of(8, group(4, 2)))
    both("close", filled(both, [1, 2, 3, 4, 5, 6, 7, 8]))
    both("close", filled(both, [1, 2, 3, 4, 5, 9]))
    assert both("peek", ints(1, 2, 3, 4, 5, 6, 0), "") == 6
    assert both("peek", ints(1, 2, 3, 4, 5, 0), "") == 5


def test_a_mark_goes_with_its_side_when_an_edge_is_split() -> None:
    both = Pair(pool_of(30, group(8, 2), state(2, 5)))
    for length in (5, 11, 20):
        both("close", filled(both, list(range(length))))
    both("close", filled(both, [*range(9), 99, 98, 97]))
    state_ends = {(e.end, e.node_start, e.node_end) for e in both.check().index if e.group == 1}
    assert state_ends == {(5, 0, 9), (11, 9, 20), (20, 9, 20), (12, 9, 12)}
    assert both("peek", ints(*range(12)), "") == 11
    assert both("peek", ints(*range(8)), "") == 5


def test_states_are_kept_where_a_prompt_ends_and_on_the_way() -> None:
    both = Pair(pool_of(100, group(16, 2), state(3, 5)))
    handle = both("open", np.arange(700, dtype=np.int32), "")
    both("claim", handle, 800)
    both("grow", ints(handle), ints(700))
    rows = both("checkpoint", ints(handle), ints(700))
    assert rows[:, 2].tolist() == [end for end in (512, 640, 256, 128, 64) for _ in range(3)]
    assert rows[:, 3].tolist() == [0, 1, 2] * 5
    assert {-4, -2} <= set(both.check().owner)
    both("advance", ints(handle), ints(700))
    assert both("totals").checkpoint_pages == (0, 15)
    assert both("peek", np.arange(600, dtype=np.int32), "") == 512
    assert both("checkpoint", ints(handle), ints(700)).shape == (0, 5)


@pytest.mark.parametrize("own", [[state(1, 210)], [group(16, 210, 64)]])
def test_long_prompts_have_waypoints(own: list[GroupSpec]) -> None:
    """What parts from a prompt in its midst resumes there, and a full pool keeps the places."""
    both = Pair(pool_of(18, group(16, 70), *own))
    asked = np.arange(9_000, dtype=np.int32)
    step = 1
    for shift in range(4):
        both("begin_step", step)
        handle = both("open", np.concatenate([asked[: 5_000 + shift], asked + 10_000 * shift]), "")
        both("claim", handle, 14_010 + shift)
        computed = both("hit_tokens", handle)
        while computed < 14_000 + shift:
            computed = min(computed + 3_000, 14_000 + shift)
            if both("grow", ints(handle), ints(computed))[0] == 0:
                break
            both("checkpoint", ints(handle), ints(computed))
            both("advance", ints(handle), ints(computed))
            both.check()
            step += 1
            both("begin_step", step)
        both("close", handle)
        both.check()
        for parted in (4_000, 5_500, 9_800, 11_900, 13_400):
            both("peek", np.append(asked[:parted], 7), "")


@pytest.mark.parametrize(
    ("window", "every", "steps"),
    [
        (200, 16, 60),
        pytest.param(200, 16, 100, marks=pytest.mark.long),
        pytest.param(1024, 32, 100, marks=pytest.mark.long),
    ],
)
def test_pages_of_long_windows_are_renewed_less_often(window: int, every: int, steps: int) -> None:
    """Of a request that goes on for longer than was expected: what a window left behind at the
    prompt's end is as young as it, or nearly."""
    both = Pair(pool_of(300, group(1, 24), group(1, 24, window)))
    handle, length = both("open", np.arange(1_100, dtype=np.int32), ""), 0
    both("claim", handle, 1_100)
    times = []
    for step, computed in enumerate([1_100, 2_300, *range(2_301, 2_301 + steps)], start=1):
        both("begin_step", step)
        known = max(length, 1_100)
        for token in range(known, computed):
            both("append", ints(handle), ints(token))
        assert both("grow", ints(handle), ints(computed))[0] == 1
        both("advance", ints(handle), ints(computed))
        length = computed
        snapshot = both.check()
        left = [key for page, key in snapshot.keys[1].items() if not snapshot.refs[1].get(page)]
        times.append(max(left, default=None))
    changes = [i for i in range(3, len(times)) if times[i] != times[i - 1]]
    assert changes
    assert {b - a for a, b in itertools.pairwise(changes)} == {every}


def test_a_state_that_is_not_reached_is_not_kept() -> None:
    both = Pair(pool_of(9, group(16, 9), state(1, 1)))
    handle = both("open", np.arange(100, dtype=np.int32), "")
    both("grow", ints(handle), ints(100))
    assert both("checkpoint", ints(handle), ints(100))[:, 2].tolist() == [64]
    both("advance", ints(handle), ints(50))
    assert both.check().holders[0].others == ()
    assert both("checkpoint", ints(handle), ints(100))[:, 2].tolist() == [64]
    both("close", handle)


def test_of_a_long_prompt_its_budget_is_kept() -> None:
    both = Pair(pool_of(12, dropping(4, 2, 8), group(4, 2)))
    handle = filled(both, list(range(18)))
    assert [len(pages) for _, pages in both.check().holders[0].groups] == [2, 5]
    both("append", ints(handle), ints(7))
    both("grow", ints(handle), ints(19))
    both("advance", ints(handle), ints(19))
    both("close", handle)
    assert both.check().index == ()
    both("close", filled(both, list(range(7))))
    assert both("peek", ints(*range(20)), "", prompt_tokens=20) == 7


def test_an_image_is_found_whole_or_not() -> None:
    both = Pair(pool_of(12, group(2, 2), images(GroupKind.CROSS, 2, 3)))
    both("close", shown(both, 1, 2, -5, -5, 3, 4, 5))
    again, other = (1, 2, -5, -5, 3, 9), (1, 2, -6, -6, 3, 9)
    assert both("peek", ints(*again), "", **with_image(*again)) == 5
    assert both("peek", ints(*other), "", **with_image(*other)) == 2
    handle = shown(both, *again)
    assert both.check().holders[0].groups[1] == (0, (6, 7, 8))
    assert both("held_pages", handle)[:, 1].tolist() == [0, 0, 0, 1, 1, 1]


def test_embeddings_are_left_behind_as_they_are_read() -> None:
    both = Pair(pool_of(12, group(4, 2), images(GroupKind.VISION, 2, 4)))
    tokens = (1, 2, -5, -5, -5, -5, 3)
    handle = both("open", ints(*tokens), "", **with_image(*tokens))
    both("grow", ints(handle), ints(3))
    held = []
    for computed in (2, 3, 4, 5, 6):
        both("grow", ints(handle), ints(computed))
        both("advance", ints(handle), ints(computed))
        first, pages = both.check().holders[0].groups[1]
        held.append((first, len(pages)))
    assert held == [(0, 6), (1, 5), (3, 3), (4, 2), (6, 0)]


def test_whole_images_get_pages_at_once_where_embeddings_lie_in_them() -> None:
    both = Pair(pool_of(12, replace(group(2, 2), holds_embeddings=True)))
    tokens = (1, 2, -5, -5, -5, -5, 3)
    handle = both("open", ints(*tokens), "", **with_image(*tokens))
    both("grow", ints(handle), ints(2))
    assert len(both("held_pages", handle)) == 1
    both("grow", ints(handle), ints(3))
    assert len(both("held_pages", handle)) == 3


def test_models_share_a_pool_but_no_prefixes() -> None:
    small, big = group(4, 2), replace(group(4, 5, 6), model="big")
    both = Pair(pool_of(8, small, big))
    both("close", filled(both, list(range(12))))
    assert both("peek", ints(*range(12)), "") == 11
    assert both("peek", ints(*range(12)), "", model="big") == 0
    both.refused(ValueError, "no group of the pool belongs to model \"it's\"", "peek",
                 ints(1), "", model="it's")  # fmt: skip


def test_a_model_with_more_pages_to_a_large_page_comes_later() -> None:
    both = Pair(pool_of(6, group(4, 3), state(2, 5)))
    handle = filled(both, list(range(10)))
    both("close", filled(both, [*range(7), 99]))
    before = both.check()
    both.register([sized(replace(group(1, 210, 30), model="new"))])
    after = both.check()
    assert (after.refs[:2], after.keys[:2]) == (before.refs, before.keys)
    assert both("peek", ints(*range(7), 99, 98), "") == 8
    new = both("open", ints(*range(200)), "", model="new")
    both("grow", ints(new, handle), ints(150, 12))
    both("advance", ints(new, handle), ints(150, 10))
    for each in (handle, new):
        both("close", each)
    assert both.check().used == (0,) * 6


def test_groups_that_do_not_fit_are_not_registered() -> None:
    both = Pair(pool_of(6, group(4, 3)))
    late = sized(replace(group(4, 2), model="late"))
    both.refused(ValueError, "model '' is in the pool already", "register", [group(4, 3)])
    uneven = [late, replace(late, page_stride_bytes=64)]
    both.refused(ValueError, "do not divide the large page", "register", uneven)
    shares = Pair(confined(pool_of(6, group(4, 3))))
    shares.refused(ValueError, "cut into shares at start", "register", [late])


@pytest.mark.parametrize("rows", [[[0, 2, 2], [1, 1, 1]], [[3, 2, 2]], [[0, 0, 1]], [[0, 1, 0]]])
def test_images_lie_in_the_text_and_apart(rows: list[list[int]]) -> None:
    both = Pair(pool_of(6, group(4, 3)))
    both.refused(
        ValueError, "overlaps, is empty or is outside", "open", ints(1, 2, 3, 4), "",
        images=np.asarray(rows, np.int32),
    )  # fmt: skip


def test_scattered_pages_are_gathered() -> None:
    both = Pair(pool_of(16, group(1, 4)))
    handles = [both("open", ints(n), "") for n in range(4)]
    for until in range(1, 9):
        for handle in handles:
            both("append", ints(handle), ints(until))
            both("grow", ints(handle), ints(until))
            both("advance", ints(handle), ints(until))
    for handle in handles[1:]:
        both("close", handle, renew=False)
    moved = both("compact", 1)
    assert moved.shape == (4, 4)
    assert moved[:, 0].tolist() == [handles[0]] * 4
    assert both("copies")[:, 3].tolist() == moved[:, 3].tolist()
    assert len(both.check().holders[0].others) == 4
    both("append", ints(handles[0]), ints(9))
    both("grow", ints(handles[0]), ints(9))
    both("advance", ints(handles[0]), ints(9))
    assert both.check().holders[0].others == ()


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
        by_name("checkpoint", ints(1), ints(4)),
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


@pytest.mark.parametrize("given", [np.zeros((1, 2), np.int32), np.zeros(3, np.int32), "image"])
def test_images_are_rows_of_three(core: CompiledCore, given: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        core.peek(ints(1, 2, 3, 4), "", images=given)


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
