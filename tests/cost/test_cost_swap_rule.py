"""Swap or recompute, by bytes."""

import pytest

from kvell.cost.swap_rule import SwapRule, rule_of_weights


def test_bytes_are_counted_both_ways() -> None:
    rule = SwapRule(100.0)
    assert rule.swaps(10, 500)
    assert not rule.swaps(10, 501)
    assert not rule.swaps(0, 0), "nothing was computed"


def test_a_model_of_more_weights_swaps_more() -> None:
    assert rule_of_weights(16_000, "cpu").swaps(1, 500)
    assert not rule_of_weights(16_000, "cpu").swaps(1, 501)
    assert not rule_of_weights(16_000, "cuda").swaps(1, 2)
    with pytest.raises(KeyError):
        rule_of_weights(1, "tpu")
