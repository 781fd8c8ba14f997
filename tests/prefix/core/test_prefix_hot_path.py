"""What the compiled core keeps beside its tables, so that a step costs little: it shows in no plan.

Everything is asked of both cores, which must agree.
"""

import numpy as np
import pytest

from kvell.pages.layout import GroupKind, GroupSpec
from tests.models.cases import covering, some_fast
from tests.pages.pools import Chunk, dropping, group, images, state
from tests.prefix.core.lockstep import Pair, decoded, filled, ints, pool_of


def test_handles_are_found_among_many_that_came_and_went() -> None:
    """One outlives hundreds of others, whose places in the map are taken and left in any order."""
    both, draw = Pair(pool_of(4, group(4, 2))), np.random.default_rng(0)
    first = filled(both, [1, 2, 3])
    running: list[int] = []
    for round_number in range(300):
        running.append(both("open", ints(round_number), ""))
        both("claim", running[-1], 2)
        if len(running) > draw.integers(1, 40):
            gone = running.pop(int(draw.integers(0, len(running))))
            both("close", gone)
            both.refused(KeyError, str(gone), "hit_tokens", gone)
        for handle in (first, *running):
            both("hit_tokens", handle)
    both("append", ints(first, *running), np.zeros(len(running) + 1, np.int32))
    assert len(both.check().holders) == len(running) + 1


@pytest.mark.parametrize("window", [1, 3, 40, Chunk(24)])
def test_a_window_goes_on_for_many_times_its_length(window: int) -> None:
    both = Pair(pool_of(40, group(2, 3), group(2, 5, window)))
    handle = filled(both, list(range(30)))
    lengths = {handle: 30}
    for step in range(160):
        both("begin_step", step)
        assert decoded(both, [handle], lengths, step) == [handle]
        both("held_pages", handle)
        if step % 16 == 0:
            both.check()
    assert both.check().holders[0].groups[1][0] > 60
    both("close", handle)
    assert both("peek", ints(*range(30), *range(160), 7), "") == 190


def test_a_budget_cuts_a_table_that_was_looked_through() -> None:
    """Positions behind the cut are filled again, and what lies there is gathered like the rest."""
    both, moved = Pair(pool_of(150, dropping(1, 4, 2), group(1, 2))), 0
    both("begin_step", 0)
    handles = [both("open", np.full(20, n, np.int32), "") for n in range(4)]
    for handle in handles:
        both("claim", handle, 1)  # nothing is known of what it will want: its pages lie anywhere
    for until in range(1, 21):
        who = np.asarray(handles, np.int32)
        assert both("grow", who, np.full(4, until, np.int32))[0] == 4
        assert not len(both("compact", 2))
        both("advance", who, np.full(4, until, np.int32))
    lengths = dict.fromkeys(handles, 20)
    for step in range(1, 26):
        both("begin_step", step)
        if step == 12:
            for other in handles[1:]:
                both("close", other, renew=False)
        running = handles if step < 12 else handles[:1]
        assert decoded(both, running, lengths, step) == running
        rows = both("compact", 2)
        moved += sum(group == 0 for _, group, _, _ in rows.tolist())
        both("copies")
        both.check()
    assert moved


def test_what_a_budget_cut_off_counts_as_looked_through_no_longer() -> None:
    """New pages at positions that were looked through before the cut are gathered in time.

    Nothing else makes anybody look again: each large page that loses a page to the cut keeps two
    of three, and the new pages lie beside cached ones alone.
    """
    both = Pair(pool_of(30, dropping(1, 3, 2)))
    both("begin_step", 0)

    def grown(handle: int, until: int) -> None:
        assert both("grow", ints(handle), ints(until))[0] == 1
        both("advance", ints(handle), ints(until))

    def opened(prompt: list[int], expected: int) -> int:
        handle = int(both("open", ints(*prompt), ""))
        both("claim", handle, expected)
        return handle

    cut, *others = (opened([n] * length, 1) for n, length in enumerate((5, 20, 20)))
    for until in range(1, 5):
        for handle in (cut, *others):
            grown(handle, until)  # a page each in every large page
    for n in range(3):  # and three large pages with two cached pages and room for one
        short = opened([50 + n, 60 + n], 3)
        grown(short, 2)
        both("close", short)
    grown(opened([99] * 20, 1), 1)  # pages are gathered only where some room is left unused
    assert not len(both("compact", 9))
    grown(cut, 5)
    for handle in others:
        grown(handle, 5)  # into the two holes that the cut left
    for token in range(3):  # nobody looks meanwhile: most steps have no memory to spare for it
        both("append", ints(cut), ints(token))
        grown(cut, 6 + token)
    rows = both("compact", 9)
    assert [position for _, _, position, _ in rows.tolist()] == [2, 3, 4]
    both.check()


@covering(
    {
        "groups": [
            pytest.param([group(1, 4)], id="full"),
            pytest.param([group(1, 5), group(1, 3, window=9)], id="window"),
            pytest.param([group(2, 7), group(1, 2, Chunk(6))], id="chunk"),
            pytest.param([group(1, 6), state(2, 3)], id="state"),
        ],
        "seed": some_fast(range(6), range(2)),
    },
    together=1,
)
def test_pages_are_gathered_as_soon_as_they_are_scattered(
    groups: list[GroupSpec], seed: int
) -> None:
    """Looking only at what may have changed finds what looking at everything finds."""
    moved, quiet = gathered(groups, seed, 90, 9)
    assert moved
    assert quiet


@covering(
    {
        "groups": [
            pytest.param([group(1, 42), group(1, 21, window=50)], id="long window"),
            pytest.param([group(1, 30), group(1, 14, window=9)], id="short window"),
        ],
        "seed": some_fast(range(6), range(2)),
    },
    together=1,
)
def test_pages_beside_many_of_one_large_page_are_found(groups: list[GroupSpec], seed: int) -> None:
    """Most of a long prompt's pages follow each other in one large page; some lie in holes."""
    moved, _ = gathered(groups, seed, 24, 60)
    assert moved


def gathered(groups: list[GroupSpec], seed: int, num_large: int, longest: int) -> tuple[int, int]:
    """Requests come and go: pages moved, and steps in which none were."""
    both, draw = Pair(pool_of(num_large, *groups)), np.random.default_rng(seed)
    lengths: dict[int, int] = {}
    running: list[int] = []
    moved = quiet = 0
    for step in range(140):
        both("begin_step", step)
        if len(running) < 10 and draw.random() < 0.4:
            prompt = [*range(int(draw.integers(0, longest))), 500 + step]
            handle = both("open", ints(*prompt[:-1]), "")
            both("claim", handle, len(prompt))
            lengths[handle] = len(prompt) - 1
            running += decoded(both, [handle], lengths, prompt[-1])
        if running and draw.random() < 0.12:
            gone = running.pop(int(draw.integers(0, len(running))))
            both("close", gone, renew=bool(draw.random() < 0.5))
        running = decoded(both, running, lengths, int(draw.integers(0, 3)))
        found = len(both("compact", int(draw.integers(1, 4))))
        both("copies")
        moved, quiet = moved + found, quiet + (not found)
        if step % 7 == 0:
            both.check()
    both.check()
    return moved, quiet


@pytest.mark.parametrize(
    "spec", [state(5, 1), state(3, 4), images(GroupKind.CROSS, 2, 1), images(GroupKind.CROSS, 1, 3)]
)
def test_pages_of_one_end_are_evicted_one_by_one(spec: GroupSpec) -> None:
    """While some of them are gone nothing resumes there; named again, they do."""
    both = Pair(pool_of(40, group(4, 3), spec))
    shown = np.asarray([[2, 5, 5]], np.int32)
    prompt = list(range(24))
    for round_number in range(3):
        both("begin_step", 4 * round_number)
        handle = both("open", ints(*prompt), "", images=shown)
        both("claim", handle, 24)
        assert both("grow", ints(handle), ints(24))[0] == 1
        both("checkpoint", ints(handle), ints(24))
        both("copies")
        both("advance", ints(handle), ints(24))
        both("close", handle)
        assert both("peek", ints(*prompt, 9), "", images=shown) == 24
        hits = set()
        other, lengths = both("open", ints(1000 + round_number), ""), {}
        lengths[other] = 0
        both("begin_step", 4 * round_number + 1)
        for step in range(600):
            if not decoded(both, [other], lengths, step):
                break
            hits.add(both("peek", ints(*prompt, 9), "", images=shown))
            if step % 20 == 0:
                both.check()
        assert 0 in hits
        assert 24 in hits
