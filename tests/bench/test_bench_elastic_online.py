"""Sides of the online bench: the same requests, memory, and meaning of goodput."""

from dataclasses import replace
from typing import Any

import pytest

from bench.elastic import online
from bench.elastic.online import CASES, SIDES, Bench, goodput, make_bench, rising, run


@pytest.fixture(scope="module")
def bench() -> Bench:
    small = replace(CASES[2], memory_gib=5.0, requests=24)
    return make_bench(small, "a100-80", "pcie-4")


def test_rates_rise_by_a_quarter() -> None:
    assert rising(0.8, 3) == pytest.approx((0.8, 1.0, 1.25))


def test_both_ways_through_the_buffer_are_equal_and_nobody_is_lost(bench: Bench) -> None:
    alone, ahead = (run(bench, side, 50.0) for side in (SIDES[3], SIDES[5]))
    for found in (alone, ahead):
        assert found["slo_attainment"] > 0
        assert found["virtual_seconds"] > 0
    assert alone["cpu_buffer"] == {}
    buffer = ahead["cpu_buffer"]
    assert buffer["in_bytes"] == buffer["out_bytes"]
    assert buffer["holders"] == buffer["used_large_pages"] == buffer["parked"] == 0


@pytest.mark.parametrize("keeps_up_to", [0, 1, 4, 12])
def test_goodput_is_the_highest_rate_in_time(
    bench: Bench, keeps_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = rising(1.0)

    def pretend(_bench: Bench, _side: online.Side, rate: float) -> dict[str, Any]:
        return {"rate": rate, "slo_attainment": 0.95 if rate in rates[:keeps_up_to] else 0.5}

    monkeypatch.setattr(online, "run", pretend)
    best, runs = goodput(bench, SIDES[0], rates)
    assert best == (rates[keeps_up_to - 1] if keeps_up_to else 0.0)
    assert len(runs) <= 4
    assert [one["rate"] for one in runs] == sorted(one["rate"] for one in runs)
