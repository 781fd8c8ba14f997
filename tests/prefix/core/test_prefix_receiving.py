"""A holder that receives what it computed: it holds what a later step reads, and no page more."""

import numpy as np
import pytest

from kvell.memory import create_core
from kvell.pages.layout import GroupSpec
from tests.pages.pools import Chunk, group, pool_of

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
