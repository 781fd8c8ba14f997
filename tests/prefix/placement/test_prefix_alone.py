"""The contract's promise: what is said to fit alone gets through, whatever is cached."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvell.memory import MANAGERS, Manager, create_core, longest_request
from tests.depth import many
from tests.pages.pools import Chunk
from tests.prefix.mixes import small_layout
from tests.prefix.story import Story

SHAPES = st.sampled_from(
    [
        ([0], [1]),
        ([6], [2]),
        ([0, 6], [1, 3]),
        ([0, 9], [3, 1]),
        ([0, 9], [7, 1]),
        ([0, 5, 14], [1, 2, 3]),
        ([Chunk(8)], [2]),
        ([0, Chunk(12)], [3, 1]),
        ([0, Chunk(10)], [7, 1]),
        ([0, 5, Chunk(14)], [1, 2, 3]),
    ]
)


@given(
    shape=SHAPES,
    num_large=st.integers(4, 30),
    manager=st.sampled_from(MANAGERS),
    chunk=st.integers(1, 24),
    history=st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=6),
    surprise=st.integers(0, 40),
)
@many()
def test_longest_request_gets_through_from_nothing(
    shape: tuple[list[int], list[int]],
    num_large: int,
    manager: Manager,
    chunk: int,
    history: list[tuple[int, bool]],
    surprise: int,
) -> None:
    """Requests came and went before; then one of the promised length runs alone.

    Its length was not known beforehand (``surprise`` tokens more than expected), and
    it reuses nothing.
    """
    layout = small_layout(*shape, num_large, manager)
    length = longest_request(layout, 120, chunk)
    story = Story(layout)
    for size, renew in history:
        story.next_step()
        earlier = story.open([size % 3, *range(size)])
        reached = story.core.largest(earlier, size)
        if reached > story.core.hit_tokens(earlier):
            story.compute(earlier, reached)
        story.core.close(earlier, renew=renew)
    tokens = np.arange(length, dtype=np.int32)
    handle = story.core.open(tokens, "", reuse=False)
    story.core.claim(handle, max(1, length - surprise))
    computed = 0
    while computed < length:
        story.next_step()
        reached = min(length, computed + chunk)
        assert story.core.largest(handle, reached) == reached, f"stuck at {computed} of {length}"
        story.compute(handle, reached)
        computed = reached


def test_nothing_is_reused_unless_asked_for() -> None:
    story = Story(small_layout([0], [1], 8))
    first = story.open(range(20))
    story.compute(first, 20)
    core = story.core
    again = core.open(np.arange(20, dtype=np.int32), "", reuse=False)
    assert core.hit_tokens(again) == 0
    assert core.hit_tokens(core.open(np.arange(20, dtype=np.int32), "")) == 19
    assert create_core(story.layout).totals().used_pages == (0,)
