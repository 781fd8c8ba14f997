"""Texts with images that come from elsewhere: both cores take what is theirs, whole images only."""

from dataclasses import replace

import numpy as np
import pytest

from kvell.memory import HoldingCore, create_core
from kvell.pages.layout import GroupKind
from tests.pages.pools import group, images, pool_of
from tests.prefix.core.lockstep import clean, insert, ints

PICTURES = {
    "cross": pool_of(40, group(4, 2), images(GroupKind.CROSS, 4, 2)),
    "vision": pool_of(40, group(4, 2), images(GroupKind.VISION, 4, 2)),
    "in pages": pool_of(40, replace(group(4, 2), holds_embeddings=True)),
    "mixed": pool_of(40, replace(group(4, 2), counts_images=True)),
}
SHOWN = [*range(6), *[-5] * 9, *range(20, 26), *[-7] * 4, *range(30, 35)]
ROWS = np.asarray([[6, 9, 9], [21, 4, 4]], np.int32)
"""Two images: tokens 6 … 14 and 21 … 24."""


def shown(core: HoldingCore, computed: int, *, until: int | None = None) -> int:
    """Take in what somebody else has computed of a text with images; returns the lease."""
    handle = core.open(ints(*SHOWN), "", until or 9, images=ROWS)
    core.receive(handle, computed)
    served, _ = core.grow(ints(handle), ints(computed))
    assert served == 1 and clean(core)
    return handle


def held_of(core: HoldingCore, handle: int, index: int) -> list[int]:
    rows = core.held_pages(handle)
    found: list[int] = rows[rows[:, 1] == index][:, 2].tolist()
    return found


def test_images_that_text_attends_to_come_with_it() -> None:
    """Three pages and one, each image's its own, and then they are hit like any."""
    core = create_core(PICTURES["cross"])
    core.begin_step(1)
    handle = shown(core, 30)
    assert held_of(core, handle, 1) == [0, 1, 2, 3]
    core.advance(ints(handle), ints(30))
    core.close(handle)
    assert core.peek(ints(*SHOWN, 99), "", images=ROWS) == 30
    other = [-6 if token == -7 else token for token in SHOWN]
    assert core.peek(ints(*other, 99), "", images=ROWS) == 21
    assert clean(core)


def test_images_behind_a_hit_are_taken_from_the_index() -> None:
    """A page of the second image is gone: all of the first, and what is left of both, stays."""
    core = create_core(PICTURES["cross"])
    core.begin_step(1)
    handle = shown(core, 25)
    core.advance(ints(handle), ints(25))
    core.close(handle)
    handle = core.open(ints(*SHOWN), "", 9, images=ROWS)
    before = core.hit_tokens(handle)
    core.receive(handle, 30)
    assert before == 25 and held_of(core, handle, 1) == [0, 1, 2, 3]
    _, rows = core.grow(ints(handle), ints(30))
    assert {(g, position) for _, g, position, _ in rows.tolist()} == {(0, 6), (0, 7)}


@pytest.mark.parametrize(("computed", "held"), [(15, [3]), (21, [3]), (25, []), (30, [])])
def test_embeddings_that_were_read_do_not_come(computed: int, held: list[int]) -> None:
    """Of an image that comes later what is cached stays with the request."""
    core = create_core(PICTURES["vision"])
    core.begin_step(1)
    handle = core.open(ints(*SHOWN), "other", images=ROWS)
    core.claim(handle, 40)
    core.grow(ints(handle), ints(30))
    core.advance(ints(handle), ints(30))
    core.close(handle)
    assert core.delete(ints(*SHOWN[:30]), "other") > 0
    handle = core.open(ints(*SHOWN), "other", 9, images=ROWS)
    assert core.hit_tokens(handle) == 0 and held_of(core, handle, 1) == [0, 1, 2, 3]
    core.receive(handle, computed)
    assert held_of(core, handle, 1) == held
    served, rows = core.grow(ints(handle), ints(computed))
    assert served == 1 and set(rows[:, 1].tolist()) == {0}
    core.claim(handle, 40)
    if computed < 25:
        core.grow(ints(handle), ints(25))
        assert held_of(core, handle, 1) == [3]
    assert clean(core)


@pytest.mark.parametrize("kind", ["cross", "vision", "in pages"])
@pytest.mark.parametrize("computed", [7, 14, 22, 24])
def test_no_image_comes_in_part(kind: str, computed: int) -> None:
    core = create_core(PICTURES[kind])
    core.begin_step(1)
    handle = core.open(ints(*SHOWN), "", 9, images=ROWS)
    before = core.snapshot()
    with pytest.raises(ValueError, match="cannot receive"):
        core.receive(handle, computed)
    assert core.snapshot() == before


@pytest.mark.parametrize("computed", [6, 15, 21, 25, 30])
def test_embeddings_in_pages_of_text_leave_room_for_what_comes(computed: int) -> None:
    core = create_core(PICTURES["in pages"])
    core.begin_step(1)
    handle = shown(core, computed)
    assert held_of(core, handle, 0) == list(range(-(-computed // 4)))
    core.advance(ints(handle), ints(computed))
    core.close(handle)
    assert core.peek(ints(*SHOWN, 99), "", images=ROWS) == computed


def test_pages_that_count_images_come_without_images_alone() -> None:
    core = create_core(PICTURES["mixed"])
    core.begin_step(1)
    handle = core.open(ints(*SHOWN), "", 9, images=ROWS)
    with pytest.raises(ValueError, match="cannot receive"):
        core.receive(handle, 30)
    core.close(handle)
    insert(core, range(30), 30)
