"""Pages held for what comes from elsewhere: both cores, beside requests that run."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvell.memory import create_core, pages_of_text
from kvell.pages.layout import GroupSpec, Layout
from kvell.prefix.groups.facts import facts_of
from kvell.prefix.groups.needs import dropped_tokens
from tests.depth import machine
from tests.pages.pools import Chunk, group, pool_of, state
from tests.prefix.core.lockstep import LockStep, cannot_receive, clean, few_letters, insert, ints


def needed(layout: Layout, num_tokens: int, model: str = "") -> list[int]:
    counts: list[int] = pages_of_text(layout, num_tokens, model)[:, 1].tolist()
    return counts


def own_groups(layout: Layout, model: str) -> list[GroupSpec]:
    return [one for one in layout.groups if one.model == model]


def drops(layout: Layout, num_tokens: int, model: str) -> bool:
    facts = facts_of(num_tokens, None, None)
    return any(dropped_tokens(one, facts) for one in own_groups(layout, model))


class Holds(LockStep):
    """What is held expires, is claimed, put into the index, or given back."""

    @precondition(lambda self: self.past)
    @rule(
        chosen=st.integers(0, 99),
        more=st.sampled_from([[], [1], [0, 1, 1, 0, 1]]),
        part=st.integers(0, 9),
        lease=st.integers(0, 2),
        what=st.sampled_from(["insert", "insert", "claim", "leave", "close"]),
        model=st.integers(0, 5),
        shows=st.sampled_from([True, True, False]),
    )
    def hold(
        self,
        chosen: int,
        more: list[int],
        part: int,
        lease: int,
        what: str,
        model: int,
        shows: bool,
    ) -> None:
        """A text's pages, and those of its images, come from elsewhere as far as they are not
        here; ``shows``: nobody need say that some of the text are images."""
        old, root, options = self.past[chosen % len(self.past)]
        tokens = [*old, *more]
        images = options["images"] if shows else None
        name = self.models[model % len(self.models)]
        until = self.step + lease
        handle = self.both("open", ints(*tokens), root, until, images=images, model=name)
        self.note_opened(handle, name)
        self.both("sources", handle)
        hit = self.both("hit_tokens", handle)
        computed = hit + part * (len(tokens) - hit) // 9
        facts = facts_of(len(tokens), None, images)
        if cannot_receive(own_groups(self.both.layout, name), facts, computed):
            self.both.refused(ValueError, "cannot receive", "receive", handle, computed)
            self.both("close", handle, renew=False)
            return
        self.both("receive", handle, computed)
        served, _ = self.both("grow", ints(handle), ints(computed))
        self.both("held_pages", handle)
        if not served or what == "close":
            self.both("close", handle, renew=False)
        elif what == "insert":
            self.both("advance", ints(handle), ints(computed))
            self.both("close", handle)
            if computed > hit and computed == len(tokens):
                asked = ints(*tokens, 7)
                assert self.both("peek", asked, root, images=images, model=name) >= hit
        elif what == "claim" and computed < len(tokens):
            self.running(handle, len(tokens), len(tokens) + 3)
            self.computed[handle] = computed

    @rule(
        counts=st.lists(st.integers(0, 5), min_size=8, max_size=8),
        lease=st.integers(0, 2),
        model=st.integers(0, 5),
        what=st.sampled_from(["leave", "close", "renew"]),
    )
    def reserve(self, counts: list[int], lease: int, model: int, what: str) -> None:
        name, groups = self.models[model % len(self.models)], self.both.layout.groups
        wanted = [n if one.model == name else 0 for n, one in zip(counts, groups, strict=False)]
        wanted += [0] * (len(groups) - len(wanted))
        handle = self.both("reserve", ints(*wanted), self.step + lease, model=name)
        if not handle:
            return
        held = self.both("held_pages", handle)
        assert np.bincount(held[:, 1], minlength=len(groups)).tolist() == wanted
        self.both.refused(ValueError, "no text", "claim", handle, 3)
        self.both.refused(ValueError, "cannot receive", "receive", handle, 0)
        if what != "leave":  # else it expires
            self.both("close", handle, renew=what == "renew")

    @rule(
        text=few_letters,
        root=st.sampled_from(["", "salt"]),
        model=st.integers(0, 5),
        fewer=st.sampled_from([0, 0, 0, 1]),
    )
    def adopt(self, text: list[int], root: str, model: int, fewer: int) -> None:
        """A text that came into pages which were reserved for nothing."""
        name = self.models[model % len(self.models)]
        wanted = needed(self.both.layout, len(text), name)
        short = [max(0, n - fewer) for n in wanted]
        handle = self.both("reserve", ints(*short), self.step, model=name)
        if not handle:
            return
        if short != wanted or drops(self.both.layout, len(text), name):
            self.both.refused(ValueError, "not those", "adopt", handle, ints(*text), root)
            self.both("close", handle)
            return
        self.both("adopt", handle, ints(*text), root)
        self.both.check()
        self.both("advance", ints(handle), ints(len(text)))
        self.both("close", handle)
        self.past.append((text, root, {"images": None, "prompt_tokens": None, "model": name}))

    @precondition(lambda self: self.past)
    @rule(chosen=st.integers(0, 99), cut=st.integers(0, 3))
    def delete(self, chosen: int, cut: int) -> None:
        tokens, root, options = self.past[chosen % len(self.past)]
        tokens = tokens[: len(tokens) - cut]
        self.both("delete", ints(*tokens), root, model=options["model"])


TestHolds = Holds.TestCase
TestHolds.settings = machine(weight=0.5)

LAYOUTS = {
    "full": pool_of(40, group(4, 2)),
    "window": pool_of(40, group(4, 2), group(4, 3, window=9)),
    "state": pool_of(40, group(4, 2), state(2, 3)),
}
layouts = pytest.mark.parametrize("kind", list(LAYOUTS))


@layouts
@pytest.mark.parametrize("count", [1, 8, 11, 30])
def test_what_came_is_a_hit_up_to_its_last_token(kind: str, count: int) -> None:
    """States and half-full pages too: nothing of it was computed here."""
    core = create_core(LAYOUTS[kind])
    core.begin_step(1)
    insert(core, range(count), count)
    assert core.peek(ints(*range(count), 99), "") == count
    assert core.peek(ints(*range(count), 99), "other") == 0


@layouts
def test_only_what_is_not_here_has_to_come(kind: str) -> None:
    core = create_core(LAYOUTS[kind])
    core.begin_step(1)
    insert(core, range(20), 20)
    handle = core.open(ints(*range(40)), "", 9)
    assert core.hit_tokens(handle) == 20
    core.receive(handle, 40)
    _, rows = core.grow(ints(handle), ints(40))
    pages = {
        g: sorted(rows[rows[:, 1] == g][:, 2].tolist()) for g in range(len(core.layout.groups))
    }
    assert pages[0] == [5, 6, 7, 8, 9]
    if kind == "window":
        assert pages[1] == [8, 9]
    if kind == "state":
        assert pages[1] == [0, 1]


def test_pages_behind_the_hit_are_taken_from_the_index() -> None:
    """A state is missing, so nothing is hit; yet the text's pages need not come again."""
    core = create_core(LAYOUTS["state"])
    core.begin_step(1)
    insert(core, range(40), 40)
    handle = core.open(ints(*range(24), 77), "", 9)
    assert core.hit_tokens(handle) < 24
    core.receive(handle, 24)
    _, rows = core.grow(ints(handle), ints(24))
    assert set(rows[:, 1].tolist()) == {1}
    held = core.held_pages(handle)
    assert held[held[:, 1] == 0][:, 2].tolist() == list(range(6))
    assert clean(core)


def test_a_lease_names_what_its_prefix_fills_in_part() -> None:
    core = create_core(LAYOUTS["state"])
    core.begin_step(1)
    insert(core, range(10), 10)
    handle = core.open(ints(*range(10), 99), "", 9)
    rows = core.sources(handle).tolist()
    assert [(g, position, end) for g, position, _, end in rows] == [
        (0, 2, 10),
        (1, 0, 10),
        (1, 1, 10),
    ]
    named = {(entry.group, entry.page): entry.end for entry in core.snapshot().index}
    assert all(named[g, page] == 10 for g, _, page, _ in rows)


@layouts
def test_a_reservation_becomes_a_text(kind: str) -> None:
    core = create_core(LAYOUTS[kind])
    core.begin_step(1)
    wanted = needed(core.layout, 18)
    handle = core.reserve(ints(*wanted), 9)
    pages = core.held_pages(handle)[:, [1, 3]].tolist()
    core.adopt(handle, ints(*range(18)), "salt")
    assert core.held_pages(handle)[:, [1, 3]].tolist() == pages
    core.advance(ints(handle), ints(18))
    core.close(handle)
    assert core.peek(ints(*range(18), 99), "salt") == 18
    assert {(e.group, e.page) for e in core.snapshot().index} == {(g, p) for g, p in pages}


def test_too_few_pages_change_nothing() -> None:
    core = create_core(LAYOUTS["full"])
    before = core.snapshot()
    assert core.reserve(ints(81), 9) == 0
    assert core.snapshot() == before
    with pytest.raises(ValueError, match="one number"):
        core.reserve(ints(1, 2), 9)
    with pytest.raises(ValueError, match="one number"):
        core.reserve(ints(-1), 9)


def test_what_is_held_is_never_evicted_moved_or_lent() -> None:
    core = create_core(LAYOUTS["full"])
    core.begin_step(1)
    held = core.reserve(ints(20), 9)
    arriving = core.open(ints(*range(30)), "", 9)
    core.receive(arriving, 30)
    core.grow(ints(arriving), ints(30))
    pages = [core.held_pages(handle).tolist() for handle in (held, arriving)]
    for number in range(30):
        other = core.open(ints(*range(100 * number, 100 * number + 60)), "", reuse=False)
        core.claim(other, 60)
        served, _ = core.grow(ints(other), ints(60))
        core.compact(3)
        if served:
            core.advance(ints(other), ints(60))
        core.close(other)
    assert [core.held_pages(handle).tolist() for handle in (held, arriving)] == pages
    core.begin_step(10)
    assert not core.snapshot().holders
    assert clean(core)


@layouts
def test_a_deleted_text_leaves_what_others_share(kind: str) -> None:
    core = create_core(LAYOUTS[kind])
    core.begin_step(1)
    insert(core, range(40), 40)
    insert(core, [*range(16), *range(100, 124)], 40)
    assert core.delete(ints(*range(40)), "") > 0
    assert core.peek(ints(*range(40), 99), "") <= 16
    assert core.peek(ints(*range(16), *range(100, 124), 99), "") == 40
    assert core.delete(ints(*range(40)), "") == 0
    assert core.delete(ints(*range(16), *range(100, 124)), "") > 0
    assert not core.snapshot().index
    assert clean(core)


def test_a_text_in_use_is_not_deleted() -> None:
    core = create_core(LAYOUTS["full"])
    core.begin_step(1)
    insert(core, range(40), 40)
    lease = core.open(ints(*range(41)), "", 9)
    assert core.delete(ints(*range(40)), "") == 0
    core.close(lease)
    assert core.delete(ints(*range(40)), "") == 10


def test_reading_the_sources_of_a_request_says_what_is_copied() -> None:
    core: Any = create_core(LAYOUTS["full"])
    core.begin_step(1)
    insert(core, range(10), 10)
    handle = core.open(ints(*range(10), 99), "")
    assert core.sources(handle)[:, 1].tolist() == [2]
    core.claim(handle, 12)
    core.grow(ints(handle), ints(11))
    assert core.copies()[:, 2].tolist() == core.sources(handle)[:, 2].tolist()
    core.advance(ints(handle), ints(11))
    assert core.sources(handle).shape == (0, 4)


TOKENS = np.arange(60, dtype=np.int32)


def positions(kind: GroupSpec, computed: int) -> list[int]:
    """That a request holds which goes on behind so many tokens, and computes one."""
    core = create_core(pool_of(40, kind))
    core.begin_step(1)
    handle = core.open(TOKENS[: computed + 1], "")
    core.receive(handle, computed)
    core.claim(handle, computed + 8)
    served, _ = core.grow(np.asarray([handle], np.int32), np.asarray([computed + 1], np.int32))
    assert served == 1
    held: list[int] = core.held_pages(handle)[:, 2].tolist()
    return held


@pytest.mark.parametrize(
    ("kind", "computed", "expected"),
    [
        (group(4, 1), 40, list(range(11))),
        (group(4, 1, window=9), 40, [8, 9, 10]),
        (group(4, 1, window=9), 39, [7, 8, 9]),
        (group(4, 1, window=9), 41, [8, 9, 10]),
        (group(4, 1, window=Chunk(16)), 40, [8, 9, 10]),
        (group(4, 1, window=Chunk(16)), 48, [12]),
    ],
)
def test_the_first_page_is_the_first_that_is_read(
    kind: GroupSpec, computed: int, expected: list[int]
) -> None:
    """A window of nine tokens at position 40 reads 32 … 40."""
    assert positions(kind, computed) == expected
