"""The compiled core's queue of cached pages, and the prompts it borrows until they run."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvell.pages.layout import GroupSpec
from kvell.prefix.core.compiled import CompiledCore
from tests.pages.pools import group
from tests.prefix.core.lockstep import Pair, filled, ints, pool_of

MIXES: list[list[GroupSpec]] = [
    [group(2, 1)],
    [group(2, 3)],
    [group(2, 5), group(2, 2, window=6)],
    [group(1, 1), group(3, 70)],
]


def next_step(both: Pair, step: int) -> None:
    both("begin_step", step)


def evict_bit_by_bit(both: Pair) -> list[tuple[int, ...]]:
    """Pages given to a request that grows a token at a time until nothing is left to evict."""
    handle = both("open", ints(7_000), "")
    given: list[tuple[int, ...]] = []
    for until in range(1, 1500):
        served, rows = both("grow", ints(handle), ints(until))
        given += [tuple(row) for row in rows.tolist()]
        if not served:
            break
        both("advance", ints(handle), ints(until))
        both("append", ints(handle), ints(7_000 + until))
    both.check()
    return given


@pytest.mark.parametrize("groups", MIXES)
@pytest.mark.parametrize("seed", range(4))
def test_pages_go_in_the_same_order_however_they_came(groups: list[GroupSpec], seed: int) -> None:
    """Requests of all lengths end together and apart, and hits take pages out of the middle."""
    draw = np.random.default_rng(seed)
    both = Pair(pool_of(80, *groups))
    step, handles = 0, []
    for index in range(12):
        beginning = [int(draw.integers(0, 3))] * int(draw.integers(1, 9))
        own = [100 + index] * int(draw.integers(1, 9))
        handles.append(filled(both, beginning + own))
        if draw.random() < 0.6:
            step += 1
            next_step(both, step)
        while handles and draw.random() < 0.5:
            both("close", handles.pop(int(draw.integers(len(handles)))))
        both.check()
    for handle in draw.permutation(handles).tolist():
        both("close", handle)
    for token in range(3):
        lease = both("open", ints(*[token] * 9), "", step)
        both("close", lease, renew=bool(draw.random() < 0.5))
    both.check()
    pages = evict_bit_by_bit(both)
    assert len(pages) > 12
    assert sum(both.check().evicted_pages) > 0


def test_of_two_requests_that_end_together_the_longer_goes_first() -> None:
    both = Pair(pool_of(6, group(2, 1)))
    short, long = filled(both, [1, 1, 1, 1]), filled(both, [2] * 8)
    both("close", short)
    both("close", long)
    other = both("open", ints(3), "")
    both("grow", ints(other), ints(4))
    both.check()
    assert both("peek", ints(*[2] * 9), "") == 4
    assert both("peek", ints(*[1] * 5), "") == 4
    both("grow", ints(other), ints(8))
    assert both("peek", ints(*[2] * 9), "") == 2
    assert both("peek", ints(*[1] * 5), "") == 2


def claimed(core: CompiledCore, handle: int) -> None:
    core.claim(handle, 8)


def grown(core: CompiledCore, handle: int) -> None:
    core.grow(ints(handle), ints(8))


@pytest.mark.parametrize("run", [claimed, grown])
def test_the_array_of_a_prompt_is_the_callers_again_once_its_request_runs(
    run: Callable[[CompiledCore, int], None],
) -> None:
    core = CompiledCore(pool_of(8, group(4, 2)))
    prompt: npt.NDArray[np.int32] = ints(*range(8))
    handle = core.open(prompt, "")
    run(core, handle)
    prompt[:] = 99
    core.grow(ints(handle), ints(8))
    core.advance(ints(handle), ints(8))
    core.close(handle)
    assert core.peek(ints(*range(9)), "") == 8
    assert core.peek(ints(*[99] * 9), "") == 0


def test_the_array_of_a_lease_is_the_callers_at_once() -> None:
    core = CompiledCore(pool_of(8, group(4, 2)))
    prompt: npt.NDArray[np.int32] = ints(*range(8))
    handle = core.open(prompt, "", 5)
    prompt[:] = 99
    core.claim(handle, 8)
    core.grow(ints(handle), ints(8))
    core.advance(ints(handle), ints(8))
    assert core.peek(ints(*range(9)), "") == 8


def test_an_array_is_held_as_long_as_it_is_read_and_no_longer() -> None:
    core = CompiledCore(pool_of(8, group(4, 2)))
    prompt: npt.NDArray[np.int32] = ints(*range(8))
    kept = weakref.ref(prompt)
    handles = [core.open(prompt, ""), core.open(prompt, "")]
    del prompt
    gc.collect()
    assert kept() is not None
    core.claim(handles[0], 8)
    assert kept() is not None
    core.close(handles[1])
    assert kept() is None
