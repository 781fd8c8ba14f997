"""Lost hits by cause, on handmade rows."""

import numpy as np
import pytest

from bench.replay.losses import is_fork, losses
from kvell.simulator.traces.rows import TraceRow

BLOCK = 512


def row(*ids: int) -> TraceRow:
    return TraceRow(
        arrival_s=0.0,
        prompt_tokens=len(ids) * BLOCK,
        output_tokens=1,
        block_ids=np.array(ids, np.int64),
        block_tokens=BLOCK,
    )


ROWS = [row(1, 2, 3, 4, 5), row(1, 2, 9), row(1, 2, 3, 4, 6, 7), row(8, 8)]


@pytest.mark.parametrize(("index", "forks"), [(0, False), (1, True), (2, False), (3, False)])
def test_a_prompt_forks_where_the_nearest_went_on_for_more_than_a_block(
    index: int, forks: bool
) -> None:
    assert is_fork(ROWS, index) is forks


def test_a_prompt_that_goes_on_at_any_of_its_nearest_does_not_fork() -> None:
    rows = [row(1, 2, 3, 4), row(1, 2, 7), row(1, 2, 8)]
    assert is_fork(rows[:1] + rows[2:], 1)
    assert not is_fork(rows, 2)


def test_what_is_lost_adds_up() -> None:
    yardstick, ours = [0, 1000, 2000, 1000], [0, 400, 1500, 1200]
    found = losses("shape", ours, yardstick, ROWS)
    assert (found.hits, found.forks) == (3100 / 4000, 1)
    assert found.forked == 600 / 4000
    assert found.displaced == 500 / 4000
