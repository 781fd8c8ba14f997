"""What the index names along a text, and what a request that receives a text holds of it."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvell.memory import VisibleCore, create_core
from kvell.pages.audit import audit
from kvell.pages.layout import GroupSpec
from tests.depth import machine
from tests.pages.pools import group, pool_of, state
from tests.prefix.core.lockstep import LockStep, ints

TEXT = list(range(100, 140))


class Known(LockStep):
    """Both cores name the same pages, and no more than a hit could use."""

    @precondition(lambda self: self.past)
    @rule(chosen=st.integers(0, 99), more=st.sampled_from([[], [1], [0, 1]]))
    def ask_known(self, chosen: int, more: list[int]) -> None:
        tokens, root, options = self.past[chosen % len(self.past)]
        text = ints(*tokens, *more)
        before = self.both.check()
        rows = self.both("known", text, root, model=options["model"]).tolist()
        assert self.both.check() == before, "it only looks"
        assert rows == sorted(rows)
        named = {(entry.group, entry.page): entry.end for entry in before.index}
        assert all(named[index, page] == end <= len(text) for index, _, page, end in rows)


TestKnown = Known.TestCase
TestKnown.settings = machine(weight=0.5)


def core_of(*groups: GroupSpec, num_large: int = 40) -> VisibleCore:
    core = create_core(pool_of(num_large, *groups))
    core.begin_step(1)
    return core


def cache(core: VisibleCore, text: Sequence[int]) -> dict[tuple[int, int], int]:
    handle = core.open(ints(*text), "")
    core.claim(handle, len(text))
    core.grow(ints(handle), ints(len(text)))
    core.copies()
    pages = {(g, at): page for _, g, at, page in core.held_pages(handle).tolist()}
    core.advance(ints(handle), ints(len(text)))
    core.close(handle)
    return pages


def lose(core: VisibleCore, index: int, *pages: int) -> None:
    """Take these pages away; each is alone in its large page."""
    core.withhold(ints(*pages))
    core.restore(ints(*pages))


def resumed(core: VisibleCore, text: Sequence[int], computed: int) -> int:
    handle = core.open(ints(*text), "")
    core.receive(handle, computed)
    return handle


def rows_of(rows: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]") -> list[tuple[int, ...]]:
    return [tuple(row) for row in rows.tolist()]


def test_holes_half_full_pages_and_states_are_named() -> None:
    core = core_of(group(4, 1), state(2, 1))
    pages = cache(core, TEXT[:14])
    lose(core, 0, pages[0, 1])
    assert rows_of(core.known(ints(*TEXT), "")) == [
        (0, 0, pages[0, 0], 4),
        (0, 2, pages[0, 2], 12),
        (0, 3, pages[0, 3], 14),
        (1, 0, pages[1, 0], 14),
        (1, 1, pages[1, 1], 14),
    ]
    assert rows_of(core.known(ints(*TEXT[:13]), ""))[-1] == (0, 2, pages[0, 2], 12)
    assert rows_of(core.known(ints(*TEXT[:4], 1), "")) == [(0, 0, pages[0, 0], 4)]
    assert not len(core.known(ints(*TEXT), "another root"))
    with pytest.raises((ValueError, KeyError)):
        core.known(ints(*TEXT), "", model="nobody's")


def test_behind_a_hole_a_request_copies_what_is_known() -> None:
    core = core_of(group(4, 1))
    pages = cache(core, TEXT[:24])
    lose(core, 0, pages[0, 2])
    handle = resumed(core, TEXT, 22)
    assert rows_of(core.held_pages(handle)) == [(0, 0, 0, pages[0, 0]), (0, 0, 1, pages[0, 1])]
    kept = [(0, at, pages[0, at], 4 * at + 4) for at in (3, 4)]
    assert rows_of(core.sources(handle)) == kept
    core.claim(handle, 40)
    _, rows = core.grow(ints(handle), ints(23))
    given = {at: page for _, _, at, page in rows.tolist()}
    assert sorted(given) == [2, 3, 4, 5]
    assert rows_of(core.copies()) == [(handle, 0, pages[0, at], given[at]) for at in (3, 4)]
    assert audit(core.layout, core.snapshot()) == []
    core.advance(ints(handle), ints(23))
    assert not len(core.sources(handle)), "they are copied"
    core.close(handle)
    named = core.known(ints(*TEXT[:24]), "")
    assert [(at, page) for _, at, page, _ in named.tolist() if at < 5] == [
        (0, pages[0, 0]),
        (1, pages[0, 1]),
        (2, given[2]),
        (3, pages[0, 3]),
        (4, pages[0, 4]),
    ], "what came is named, and what was named still is"
    assert not any(core.snapshot().used)


def test_the_state_and_the_half_full_page_are_copied() -> None:
    core = core_of(group(4, 1), state(2, 1))
    pages = cache(core, TEXT[:14])
    lose(core, 0, pages[0, 0])
    handle = resumed(core, TEXT, 14)
    assert core.hit_tokens(handle) == 0
    assert rows_of(core.sources(handle)) == [
        (0, 1, pages[0, 1], 8),
        (0, 2, pages[0, 2], 12),
        (0, 3, pages[0, 3], 14),
        (1, 0, pages[1, 0], 14),
        (1, 1, pages[1, 1], 14),
    ]
    core.claim(handle, 40)
    core.grow(ints(handle), ints(15))
    assert [tuple(row[1:3]) for row in core.copies().tolist()] == [
        (0, pages[0, 1]),
        (0, pages[0, 2]),
        (0, pages[0, 3]),
        (1, pages[1, 0]),
        (1, pages[1, 1]),
    ]
    core.close(handle, renew=False)
    assert not any(core.snapshot().used)
    assert audit(core.layout, core.snapshot()) == []


def test_a_lease_stops_at_the_hole() -> None:
    """Others send it the rest, and nobody copies for it."""
    core = core_of(group(4, 1), state(1, 1))
    pages = cache(core, TEXT[:24])
    lose(core, 0, pages[0, 2])
    handle = core.open(ints(*TEXT[:24]), "", 9)
    core.receive(handle, 24)
    assert [at for _, _, at, _ in core.held_pages(handle).tolist()] == [0, 1]
    assert not len(core.sources(handle))
    _, rows = core.grow(ints(handle), ints(24))
    assert rows[:, 1:3].tolist() == [[0, 2], [0, 3], [0, 4], [0, 5], [1, 0]]
    assert not len(core.copies())


def test_what_is_kept_is_neither_evicted_nor_lost_when_the_request_gives_up() -> None:
    core = core_of(group(4, 1), num_large=8)
    pages = cache(core, TEXT[:24])
    lose(core, 0, pages[0, 0])
    handle = resumed(core, TEXT, 23)
    assert core.largest(handle, 24) == 23, "eight pages, of which four are kept: too few are left"
    assert not core.fits(handle, 24, 1, ints(), ints())
    core.close(handle, renew=False)
    assert [at for _, at, _, _ in core.known(ints(*TEXT), "").tolist()] == [1, 2, 3, 4, 5]
    alone = core.open(ints(*TEXT[:24]), "", reuse=False)
    core.receive(alone, 23)
    assert core.fits(alone, 24, 1, ints(), ints()), "alone it starts from nothing"
