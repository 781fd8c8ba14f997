"""Several models in one pool: groups of their own, shared large pages, and late arrivals."""

from dataclasses import replace

import pytest

from kvell.pages.layout import GroupSpec, Layout
from tests.pages.pools import confined, group, pool_of, state
from tests.prefix.mixes import of_model, text
from tests.prefix.rehearsal import Rehearsal

LAYOUT = pool_of(20, *of_model("", group(4, 2), group(4, 4, 9)))
WORDS = text(*range(18))


def latecomers(layout: Layout, *groups: GroupSpec) -> list[GroupSpec]:
    return [
        replace(
            spec,
            name=f"late{index}",
            model="late",
            layers=tuple(range(900, 900 + len(spec.layers))),
            page_stride_bytes=layout.large_page_bytes // spec.pages_per_large,
        )
        for index, spec in enumerate(groups)
    ]


def test_models_share_large_pages_and_no_prefixes() -> None:
    layout = pool_of(9, *of_model("big", group(4, 2)), *of_model("small", group(4, 4)))
    rehearsal = Rehearsal(layout)
    rehearsal.finish(WORDS, "big")
    assert rehearsal.peek(WORDS, "small") == 0
    rehearsal.finish(WORDS, "small")
    assert (rehearsal.peek(WORDS, "big"), rehearsal.peek(WORDS, "small")) == (17, 17)
    rehearsal.serve(text(*range(100, 172)), 72, "big")
    assert rehearsal.peek(WORDS, "small") == 0, "the other model's memory is anybody's"


def test_a_request_takes_pages_of_its_models_groups_only() -> None:
    layout = pool_of(9, *of_model("big", group(4, 2)), *of_model("small", group(4, 4), state(1, 2)))
    rehearsal = Rehearsal(layout)
    held = [rehearsal.pages(rehearsal.serve(WORDS, 18, m)) for m in ("big", "small")]
    assert [[len(pages) for pages in of] for of in held] == [[5, 0, 0], [0, 5, 1]]


def test_a_model_that_nobody_serves_is_refused() -> None:
    rehearsal = Rehearsal(LAYOUT)
    with pytest.raises(ValueError, match="no group of the pool belongs to model 'ghost'"):
        rehearsal.peek(WORDS, "ghost")


def test_a_model_registered_later_shares_the_pool() -> None:
    rehearsal = Rehearsal(LAYOUT)
    running = rehearsal.serve(WORDS, 10)
    rehearsal.register(latecomers(LAYOUT, group(8, 4), state(2, 2)))
    assert rehearsal.core.layout.large_page_bytes == LAYOUT.large_page_bytes
    rehearsal.reach(running, 18)
    assert rehearsal.finish(WORDS, "late") == 0
    assert rehearsal.finish(text(*range(18), 1, 2), "late") == 18
    rehearsal.close(running, renew=True)
    assert rehearsal.peek(text(*range(18), 1)) == 18, "who was there before goes on"


def test_a_latecomer_may_evict_what_others_left() -> None:
    layout = pool_of(4, group(4, 2))
    rehearsal = Rehearsal(layout)
    rehearsal.finish(text(*range(32)))
    rehearsal.register(latecomers(layout, group(4, 2)))
    assert rehearsal.finish(text(*range(30)), "late") == 0
    assert rehearsal.peek(text(*range(32), 1)) == 0
    assert rehearsal.core.totals().evicted_pages == (8, 0)


def test_pages_that_do_not_divide_the_large_page_are_refused() -> None:
    rehearsal = Rehearsal(LAYOUT)
    (odd,) = latecomers(LAYOUT, group(4, 3))
    before = rehearsal.check()
    with pytest.raises(ValueError, match="do not divide the large page"):
        rehearsal.core.register([odd])
    assert rehearsal.check() == before
    assert len(rehearsal.core.layout.groups) == 2


def test_a_model_is_registered_once() -> None:
    rehearsal = Rehearsal(LAYOUT)
    rehearsal.register(latecomers(LAYOUT, group(4, 2)))
    for again in (latecomers(LAYOUT, group(4, 2)), [LAYOUT.groups[0]]):
        with pytest.raises(ValueError, match="is in the pool already"):
            rehearsal.core.register(again)


def test_a_pool_cut_at_start_takes_nobody_else() -> None:
    rehearsal = Rehearsal(confined(LAYOUT))
    with pytest.raises(ValueError, match="cut into shares"):
        rehearsal.core.register(latecomers(LAYOUT, group(4, 2)))
