"""The three classes of operators, and what several devices make of them."""

from dataclasses import replace
from itertools import pairwise

import pytest

from kvell.cost.model import prefill_seconds
from kvell.cost.operators import Waves
from kvell.cost.parallel import ALONE, Parallel
from kvell.cost.swap_rule import SwapRule, rule_of_weights
from tests.cost.oracles import SHAPE, decodes, oracle, prompt


class TestWaves:
    WAVES = Waves(8, (0, 16, 64), (1.0, 0.5, 0.25))

    def test_the_last_wave_costs_as_much_as_a_full_one(self) -> None:
        """(η − 1)·T_fullwave + T_lastwave, with T_lastwave = T_fullwave."""
        assert self.WAVES.seconds(1) == self.WAVES.seconds(8) == 8.0
        assert self.WAVES.seconds(9) == 16.0

    def test_a_price_for_each_regime(self) -> None:
        assert self.WAVES.seconds(64) == 16 + 48 * 0.5
        assert self.WAVES.seconds(1000) == 16 + 48 * 0.5 + (1000 - 64) * 0.25

    def test_no_rows_no_waves(self) -> None:
        assert self.WAVES.seconds(0) == 0.0

    def test_never_falls(self) -> None:
        assert all(a <= b for a, b in pairwise(map(self.WAVES.seconds, range(300))))


class TestSteps:
    def test_a_decode_by_hand(self) -> None:
        machine = oracle()
        layers = machine.layers.seconds(2) + machine.head.seconds(2)
        read = 2 * (3 * 128 + 2 * 301)
        attention = read * (2e-8 + 6e-8)
        assert machine.step_seconds(decodes(2, 300)) == pytest.approx(
            layers + attention + 1e-3 + 2 * 5e-5
        )

    def test_attention_is_the_papers_polynomial(self) -> None:
        """a·x²y + b·x² + c·x + d, with y = cached ÷ new, in a layer of full attention."""
        machine = oracle(replace(SHAPE, reaches=SHAPE.reaches[1:]))
        layers, attention = 2, machine.attention
        for new, cached in ((100, 0), (100, 700), (64, 64)):
            y = cached / new
            a = layers * attention.pair_seconds
            b = layers * attention.pair_seconds / 2
            c = layers * (attention.pair_seconds / 2 + attention.read_seconds * (1 + y))
            found = attention.seconds(machine.shape.amounts(prompt(cached, new)))
            paper = a * new**2 * y + b * new**2 + c * new + attention.prompt_seconds
            assert found == pytest.approx(paper)

    def test_a_window_bounds_attention(self) -> None:
        windowed = oracle(replace(SHAPE, reaches=SHAPE.reaches[:1]))
        assert windowed.step_seconds(decodes(1, 500)) == windowed.step_seconds(decodes(1, 5000))


class TestParallel:
    def test_alone_says_nothing(self) -> None:
        assert ALONE.message_seconds(1000) == 0.0
        assert ALONE.stage_seconds(3.0) == 3.0

    def test_a_ring_sums_up_twice_a_layer(self) -> None:
        link = Parallel(2, 1, 10, 4, link_bytes_per_second=1e6, message_latency_seconds=1e-3)
        assert link.message_seconds(100) == pytest.approx(20 * (1e-3 + 1.0 * 400 / 1e6))
        stages = replace(link, tensor=1, pipeline=3)
        assert stages.message_seconds(100) == pytest.approx(2 * (1e-3 + 400 / 1e6))
        assert stages.stage_seconds(3.0) == 1.0

    @pytest.mark.parametrize("wrong", [{"tensor": 0}, {"pipeline": 0}, {"tensor": 2}])
    def test_devices_need_a_link(self, wrong: dict[str, int]) -> None:
        with pytest.raises(ValueError, match=r"device"):
            Parallel(**wrong)

    def test_two_devices_do_not_halve_a_prefill(self) -> None:
        """Amdahl's law: the constant share and the constants stay."""
        alone = oracle()
        alone = replace(alone, constants=replace(alone.constants, share=0.2))
        two = replace(alone, parallel=Parallel(2, link_bytes_per_second=1e12))
        before, after = (prefill_seconds(each, 1024, 0.0) for each in (alone, two))
        serial = 0.2 * alone.layers.seconds(1024) + 1e-3 + 5e-5
        assert after == pytest.approx((before - serial) / 2 + serial)
        assert after > 0.55 * before


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
