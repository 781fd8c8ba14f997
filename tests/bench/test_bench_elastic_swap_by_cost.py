"""Swap or recompute, by seconds."""

from collections.abc import Sequence

from bench.elastic.swap_by_cost import SwapByCost
from kvell.cost.work import Work


class Linear:
    """A millisecond a step, a microsecond a token."""

    def step_seconds(self, work: Sequence[Work]) -> float:
        return 1e-3 + 1e-6 * sum(one.count for one in work)


def test_seconds_of_the_link_stand_beside_those_of_the_tokens() -> None:
    rule = SwapByCost(Linear(), 1e9, 400)
    recompute_seconds = 1e-6 * 1000 - 3 * 1e-6  # three steps of 400, 400 and 200 tokens
    most_bytes = int(recompute_seconds * 1e9 / 2)
    assert rule.swaps(1000, most_bytes)
    assert not rule.swaps(1000, most_bytes + 2)
    assert not rule.swaps(0, 0)
