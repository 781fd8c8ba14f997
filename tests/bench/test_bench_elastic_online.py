"""Sides of the online bench: the same requests, memory, and meaning of goodput."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.elastic import online, sweep
from bench.elastic.offline import CHUNK_BYTES
from bench.elastic.online import (
    Bench,
    compared,
    goodput,
    make_bench,
    pool_of,
    run,
    verdicts,
    write_case,
)
from bench.elastic.online_cases import (
    BOTH,
    CASES,
    CHUNKED,
    INTRA,
    MODEL_TOKENS,
    STATIC,
    Side,
    rising,
)

FULL = replace(BOTH, fixed_gib=8.0)


@pytest.fixture
def bench() -> Bench:
    small = replace(CASES[2], memory_gib=5.0, requests=24, rates=rising(1.0, 12, 1.25))
    return make_bench(small, "pcie-4")


def seen(rate: float, in_time: float, ttft: float = 1.0, seconds: float = 10.0) -> dict[str, Any]:
    return {
        "rate": rate,
        "slo_attainment": in_time,
        "ttft_seconds": {"mean": ttft},
        "virtual_seconds": seconds,
    }


def test_rates_rise_by_a_factor() -> None:
    assert rising(0.8, 3, 1.25) == pytest.approx((0.8, 1.0, 1.25))


def test_sides_have_the_same_memory_and_serve_the_same_lengths() -> None:
    bench = make_bench(CASES[0], "pcie-4")
    pools = {}
    for side in (STATIC, CHUNKED, BOTH):
        limits = bench.limits(side)
        assert limits.max_model_len == MODEL_TOKENS
        layout, num_chunks = pool_of(bench, side, limits)
        pools[side.name] = layout.pool_bytes
        reserve = bench.need.need_bytes(limits.max_num_batched_tokens, limits.max_num_seqs)
        whole = num_chunks * CHUNK_BYTES
        expected = whole if side.shares else whole - reserve
        assert expected - layout.large_page_bytes < layout.pool_bytes <= expected
    assert pools["static"] < 0.6 * pools["both"]
    assert pools["static, chunks of 512"] > 0.99 * pools["both"]


def test_both_ways_through_the_buffer_are_equal_and_nobody_is_lost(bench: Bench) -> None:
    alone, ahead = (run(bench, side, 50.0) for side in (INTRA, FULL))
    for found in (alone, ahead):
        assert found["slo_attainment"] > 0
        assert found["virtual_seconds"] > 0
    assert alone["cpu_buffer"] == {}
    buffer = ahead["cpu_buffer"]
    assert buffer["in_bytes"] == buffer["out_bytes"]
    assert buffer["holders"] == buffer["used_large_pages"] == buffer["parked"] == 0


def test_a_case_is_written_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "online.json"
    for number, rate in ((2, 1.0), (0, 2.0), (2, 3.0)):
        write_case(number, {"rate": rate}, file)
    written = json.loads(file.read_text())
    assert written["cases"] == {"0": {"rate": 2.0}, "2": {"rate": 3.0}}
    assert written["run"]["processor"] == "virtual"


def test_a_run_is_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = list[float]()

    def pretend(_bench: Bench, _side: Side, rate: float) -> dict[str, Any]:
        rates.append(rate)
        return seen(rate, 1.0)

    monkeypatch.setattr(online, "run", pretend)
    assert bench.run(STATIC, 2.0) is bench.run(STATIC, 2.0)
    bench.run(BOTH, 2.0)
    assert rates == [2.0, 2.0]


@pytest.mark.parametrize("keeps_up_to", [0, 1, 4, 12])
def test_goodput_is_the_highest_rate_in_time(
    bench: Bench, keeps_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = bench.case.rates

    def pretend(_bench: Bench, _side: Side, rate: float) -> dict[str, Any]:
        return seen(rate, 0.95 if rate in rates[:keeps_up_to] else 0.5)

    monkeypatch.setattr(online, "run", pretend)
    assert goodput(bench, STATIC) == (rates[keeps_up_to - 1] if keeps_up_to else 0.0)
    assert len(bench.seen) <= 4


@pytest.mark.parametrize(("kept", "ttft", "failing"), [(9, 0.5, 0), (9, 2.0, 4), (5, 0.5, 2)])
def test_verdicts_ask_for_goodput_and_first_tokens(
    bench: Bench, kept: int, ttft: float, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Static sides keep up to the fourth and the fifth rate."""
    rates = bench.case.rates
    most = {STATIC: 4, CHUNKED: 5, BOTH: kept}

    def pretend(_bench: Bench, side: Side, rate: float) -> dict[str, Any]:
        in_time = 0.9 if rate in rates[: most[side]] else 0.89
        return seen(rate, in_time, ttft if side is BOTH else 1.0)

    monkeypatch.setattr(online, "run", pretend)
    told = verdicts(bench)
    assert sum(one.startswith("FAILS") for one in told) == failing
    assert len(told) == 2 + len(compared(bench))


@pytest.mark.parametrize(
    ("chosen", "failing"),
    [
        (seen(1.0, 0.9, 1.0), 0),
        (seen(1.0, 0.87, 1.09), 0),
        (seen(1.0, 0.8, 1.0), 1),
        (seen(1.0, 0.9, 1.2), 1),
        (seen(1.0, 0.9, 1.0, seconds=10.3), 1),
    ],
)
def test_a_sweep_compares_with_the_best_size_and_with_none(
    chosen: dict[str, Any], failing: int
) -> None:
    fixed = {
        "small": seen(1.0, 0.95, 1.5),
        "right": seen(1.0, 0.95, 1.0),
        "large": seen(1.0, 0.7, 0.5),
    }
    assert sweep.best_of(fixed) == "right"
    told = sweep.verdicts(chosen, seen(1.0, 0.5, 9.0), fixed)
    assert sum(one.startswith("FAILS") for one in told) == failing


def test_a_sweep_runs_every_size_and_algorithm_2(bench: Bench) -> None:
    found = sweep.sweep(bench, 40.0, draws=1)
    assert len(found["runs"]) == len(sweep.SIZES_GIB) + 2
    assert found["runs"]["fixed 0 GiB"]["cpu_buffer"]["parkings"] == 0
    assert len(found["verdicts"]) == 3


def test_a_sweep_takes_the_mean_of_its_draws(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {0: 0.25, 1: 0.75}

    def pretend(bench: Bench, _side: Side, rate: float) -> dict[str, Any]:
        found = seen(rate, 1.0, ttft=rates[bench.draw])
        found |= {"tpot_seconds": {"mean": 0.1}, "cpu_buffer": {}, "preemptions": bench.draw}
        found["ttft_seconds"]["p90"] = None
        return found

    monkeypatch.setattr(online, "run", pretend)
    monkeypatch.setattr(sweep, "line", lambda name, found: f"{name} {found}")
    runs = sweep.sweep(bench, 40.0, draws=2)["runs"]
    assert {run["ttft_seconds"]["mean"] for run in runs.values()} == {0.5}
    assert {run["ttft_seconds"]["p90"] for run in runs.values()} == {None}
    assert {run["preemptions"] for run in runs.values()} == {0.5}


def test_draws_of_a_workload_differ(bench: Bench) -> None:
    drawn = (replace(bench, draw=draw).rows(1.0) for draw in (0, 0, 1))
    first, again, second = (
        ([row.arrival_s for row in rows], [row.prompt_tokens for row in rows]) for rows in drawn
    )
    assert first == again
    assert first[0][1:] != second[0][1:]
    assert first[1] != second[1]
