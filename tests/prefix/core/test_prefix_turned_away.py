"""Who was turned away need not ask again until something happened that may let it in."""

from typing import Any

import numpy as np
import pytest

from kvell.pages.layout import Layout
from kvell.prefix.core.compiled import CompiledCore
from kvell.prefix.interface import EMPTY
from tests.oracle.core.reference import ReferenceCore
from tests.pages.pools import confined, group
from tests.prefix.core.lockstep import ints, of_model, pool_of, sized

PROMPT = [1, 1, 2, 2]
"""Of who is turned away: all but the last two tokens are cached."""


class Waiting:
    """A full pool of pages of one token, and one more request than fits.

    ``PROMPT``'s first two tokens are cached; ``runs`` decodes and has used all but ``spare`` of
    the other pages.
    """

    def __init__(self, layout: Layout, spare: int, wanted: int = 9, **options: Any) -> None:
        self.core = CompiledCore(layout)
        self.options = options
        self.serve(PROMPT[:2])
        pages = sum(layout.num_large_pages * g.pages_per_large for g in layout.groups[:1])
        self.length = pages - 2 - spare
        self.runs = self.start([7] * self.length)
        self.prompt = PROMPT + [3] * (wanted - len(PROMPT))
        self.ask()

    def serve(self, tokens: list[int]) -> None:
        self.core.close(self.start(tokens))

    def start(self, tokens: list[int]) -> int:
        handle = self.core.open(ints(*tokens), "")
        self.core.claim(handle, len(tokens))
        self.grow(handle, len(tokens))
        return handle

    def grow(self, handle: int, until: int) -> None:
        assert self.core.grow(ints(handle), ints(until))[0] == 1
        self.core.advance(ints(handle), ints(until))

    def decode(self) -> None:
        self.core.append(ints(self.runs), ints(7))
        self.length += 1
        self.grow(self.runs, self.length)

    def ask(self) -> bool:
        handle = self.core.open(ints(*self.prompt), "", **self.options)
        others, lengths = ints(self.runs), ints(self.length + 1)
        fits = self.core.fits(handle, len(self.prompt), 4, others, lengths)
        self.core.close(handle, renew=False)
        return fits


def test_it_waits_while_others_grow_over_pages_of_their_own() -> None:
    waiting = Waiting(pool_of(20, group(1, 1)), spare=4)
    assert not waiting.core.may_fit()
    for _ in range(3):
        waiting.decode()
        waiting.core.compact(4)
        assert not waiting.core.may_fit()
    assert not waiting.ask()


def test_it_waits_until_as_many_large_pages_are_freed_as_it_is_short_of() -> None:
    """It lacks two: it wants seven beyond its hit, the runner one, and six are there."""
    waiting = Waiting(pool_of(20, group(1, 1)), spare=10)
    empty = np.flatnonzero(waiting.core.reclaim_order() == EMPTY).astype(np.int32)
    assert len(empty) == 10
    waiting.core.withhold(empty[:4])
    assert not waiting.ask()
    assert not waiting.core.may_fit()
    waiting.core.restore(empty[:1])
    assert not waiting.core.may_fit()
    waiting.core.restore(empty[1:2])
    assert waiting.core.may_fit()
    assert waiting.ask()


def test_it_asks_again_when_somebody_ends() -> None:
    waiting = Waiting(pool_of(20, group(1, 1)), spare=4)
    lease = waiting.core.open(ints(7, 7, 8), "", 99)
    assert not waiting.core.may_fit(), "a lease changes nothing"
    waiting.core.close(lease)
    assert waiting.core.may_fit()


def test_it_asks_again_when_more_of_its_prompt_is_cached() -> None:
    waiting = Waiting(pool_of(20, group(1, 1)), spare=9)
    other, like, same = (waiting.start([*text]) for text in ([9, 9], [1, 1, 5, 5], PROMPT[:3]))
    assert waiting.core.may_fit(), "others were opened since"
    assert not waiting.ask()
    for handle, token, length in [(other, 9, 3), (like, 5, 5)]:
        waiting.core.append(ints(handle), ints(token))
        waiting.grow(handle, length)
        assert not waiting.core.may_fit()
    waiting.core.append(ints(same), ints(PROMPT[3]))
    assert not waiting.core.may_fit()
    waiting.grow(same, 4)
    assert waiting.core.may_fit()


def test_it_asks_again_when_less_of_its_prompt_is_cached() -> None:
    waiting = Waiting(pool_of(20, group(1, 1)), spare=1)
    waiting.decode()
    assert not waiting.core.may_fit()
    waiting.decode()
    assert waiting.core.totals().evicted_pages == (1,)
    assert waiting.core.may_fit()


def test_it_asks_again_once_the_others_have_left_where_they_resumed() -> None:
    """Behind a window, the first page of a hit may be one that no step needs any more."""
    waiting = Waiting(pool_of(20, group(1, 1)), spare=4)
    resumed = waiting.core.open(ints(*[7] * 6, 8, 8), "")
    waiting.core.claim(resumed, 9)
    assert not waiting.ask()
    waiting.grow(resumed, 7)
    assert waiting.core.may_fit()
    assert not waiting.ask()
    waiting.grow(resumed, 8)
    assert not waiting.core.may_fit()


def test_it_asks_again_when_it_was_let_in_and_came_back() -> None:
    waiting = Waiting(pool_of(20, group(1, 1)), spare=4)
    handle = waiting.core.open(ints(*waiting.prompt), "")
    assert waiting.core.may_fit(), "its question is open"
    waiting.core.claim(handle, 9)
    waiting.core.close(handle)
    assert waiting.core.may_fit()


def test_it_asks_again_when_a_model_is_added() -> None:
    waiting = Waiting(pool_of(20, group(1, 1)), spare=4)
    assert not waiting.core.may_fit()
    waiting.core.register([sized(spec) for spec in of_model("late", group(1, 2))])
    assert waiting.core.may_fit()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (pool_of(20, group(1, 1)), {"images": np.asarray([[0, 1, 1]], np.int32)}),
        (confined(pool_of(20, group(1, 1))), {}),
    ],
)
def test_with_images_or_shares_it_always_asks(layout: Layout, options: dict[str, Any]) -> None:
    waiting = Waiting(layout, spare=4, **options)
    assert not waiting.ask()
    assert waiting.core.may_fit()


def test_the_plain_core_is_always_asked() -> None:
    assert ReferenceCore(pool_of(4, group(1, 1))).may_fit()
