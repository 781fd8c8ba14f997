"""Requests that arrive at sides in turn: their lengths, and the verdicts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.elastic import online_served
from bench.elastic.in_turn import alternated
from bench.elastic.narrow_models import narrow_model
from bench.elastic.online_served import (
    BOTH,
    CHUNKED,
    SETTINGS,
    SIDES,
    STATIC,
    Arrival,
    Served,
    arrivals,
    goodput,
    options_of,
    verdicts,
    write_workload,
)
from kvell.engine.setup.options import EngineOptions
from kvell.load.report import Objectives
from kvell.models.paged_model import PagedModel


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return narrow_model(online_served.SHAPE)


def seen(in_time: float, first: float) -> dict[str, Any]:
    return {"slo_attainment": in_time, "ttft_seconds": {"mean": first}}


class TestArrivals:
    @pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.workload)
    def test_every_request_fits_its_server(self, setting: online_served.Setting) -> None:
        asked = arrivals(setting, 2.0, 1000)
        assert len(asked) == setting.requests
        assert [one.seconds for one in asked] == sorted(one.seconds for one in asked)
        for one in asked:
            assert 0 < len(one.prompt) // 4 + one.output_tokens < setting.context_tokens

    def test_rates_change_times_alone(self) -> None:
        slow, fast = (arrivals(SETTINGS[0], rate, 1000) for rate in (1.0, 4.0))
        assert [one.prompt for one in slow] == [one.prompt for one in fast]
        assert slow[-1].seconds == pytest.approx(4 * fast[-1].seconds)


def test_sides_share_all_memory_or_keep_a_reserve(model: PagedModel) -> None:
    setting = SETTINGS[0]
    sides = options_of(model, setting, None)
    rigid, chunked = (sides[side].kv_memory_bytes or 0 for side in (STATIC, CHUNKED))
    free = (sides[BOTH].memory_bytes or 0) - model.weight_bytes
    assert rigid < 0.6 * free
    assert rigid < chunked < free
    assert all(one.max_model_len == setting.context_tokens for one in sides.values())


def test_a_side_answers_all_in_its_own_time(model: PagedModel) -> None:
    asked = [Arrival(at, b"\x05\0\0\0" * 8, 3) for at in (0.0, 1e3, 1e3)]
    options = EngineOptions(kv_memory_bytes=16 << 20, max_model_len=64, max_num_seqs=2)
    sides = [Served(STATIC, model, options, asked)]
    alternated(sides)
    first, *later = sides[0].outcomes()
    assert 0 < first.ttft_seconds < first.e2e_seconds < 1e3
    assert all(one.sent_seconds == 1e3 < 1e3 + one.ttft_seconds for one in later)
    assert {one.output_tokens for one in (first, *later)} == {3}


@pytest.mark.parametrize(
    ("in_time", "best"), [([1.0, 0.95, 0.5], 2.0), ([0.5, 1.0, 1.0], 0.0), ([0.9] * 3, 3.0)]
)
def test_goodput_is_kept_at_all_rates_below(in_time: list[float], best: float) -> None:
    runs = {float(rate): {STATIC: seen(one, 1.0)} for rate, one in enumerate(in_time, 1)}
    assert goodput(runs, STATIC) == best


@pytest.mark.parametrize(
    ("both", "first", "failing"), [(1.0, 1.0, 0), (1.0, 1.04, 0), (1.0, 1.2, 2), (0.5, 1.0, 2)]
)
def test_verdicts(both: float, first: float, failing: int) -> None:
    at_one = {side: seen(1.0, 1.0) for side in SIDES} | {BOTH: seen(both, first)}
    at_two = {STATIC: seen(0.5, 9.0), CHUNKED: seen(1.0, 1.0), BOTH: seen(both, first)}
    told = verdicts({1.0: at_one, 2.0: at_two})
    assert sum(one.startswith("FAILS") for one in told) == failing
    assert len(told) == 4


def test_a_file_keeps_the_workloads_that_are_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "served.json"
    for name, found in (("2k-2k", 1), ("32k-2k", 2), ("2k-2k", 3)):
        write_workload(name, {"found": found}, file)
    kept = json.loads(file.read_text())["workloads"]
    assert kept == {"2k-2k": {"found": 3}, "32k-2k": {"found": 2}}


def test_a_run_is_the_mean_of_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(*asked: object) -> dict[str, Any]:
        return {STATIC: {"ttft_seconds": {"mean": float(str(asked[-1]))}, "cpu_buffer": {}}}

    monkeypatch.setattr(online_served, "run_draw", pretend)
    found = online_served.run({}, replace(SETTINGS[2], draws=4), 1.0, Objectives())
    assert found == {STATIC: {"ttft_seconds": {"mean": 1.5}, "cpu_buffer": {}}}


def test_draws_of_arrivals_differ() -> None:
    first, again, second = (arrivals(SETTINGS[2], 2.0, 100, n) for n in (0, 0, 1))
    assert first == again
    assert [one.prompt for one in first] != [one.prompt for one in second]
    assert [one.seconds for one in first[1:]] != [one.seconds for one in second[1:]]
