"""Swap or recompute, by bytes and by seconds."""

from collections.abc import Sequence

import pytest

from kvell.cost.swap_rule import ByCost, BytesPerToken, rule_of_weights
from kvell.cost.work import Work


class Linear:
    """A millisecond a step, a microsecond a token."""

    def step_seconds(self, work: Sequence[Work]) -> float:
        return 1e-3 + 1e-6 * sum(one.count for one in work)


def test_bytes_are_counted_both_ways() -> None:
    rule = BytesPerToken(100.0)
    assert rule.swaps(10, 500)
    assert not rule.swaps(10, 501)
    assert not rule.swaps(0, 0), "nothing was computed"


def test_a_model_of_more_weights_swaps_more() -> None:
    assert rule_of_weights(16_000, "cpu").swaps(1, 500)
    assert not rule_of_weights(16_000, "cpu").swaps(1, 501)
    assert not rule_of_weights(16_000, "cuda").swaps(1, 2)
    with pytest.raises(KeyError):
        rule_of_weights(1, "tpu")


def test_seconds_of_the_link_stand_beside_those_of_the_tokens() -> None:
    rule = ByCost(Linear(), 1e9, 400)
    recompute_seconds = 1e-6 * 1000 - 3 * 1e-6  # three steps of 400, 400 and 200 tokens
    most_bytes = int(recompute_seconds * 1e9 / 2)
    assert rule.swaps(1000, most_bytes)
    assert not rule.swaps(1000, most_bytes + 2)
    assert not rule.swaps(0, 0)
