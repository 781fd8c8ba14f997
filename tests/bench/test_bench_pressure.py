"""Memory pressure: pools for a quarter of the batch, ratios, and decode steps."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.engine.pressure import peers
from bench.engine.pressure.cases import HELD, WANTED, Case, ample_bytes, pressed_bytes
from bench.engine.pressure.figures import (
    Figures,
    mean_ratio,
    medians,
    ratio,
    slower_without_pressure,
)
from bench.engine.pressure.real import Served
from bench.engine.pressure.small import CASES as SMALL
from bench.engine.pressure.small import config_of
from bench.engine.pressure.virtual import CASES, is_decode, measured
from bench.replay.shapes import read_shape
from bench.side_by_side.report import summary
from kvell.engine.protocol.messages import Finished, Tokens
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan
from kvell.memory import plan_layout, requests_that_fit
from kvell.models.config.description import describe
from kvell.vocabulary import RequestId, StepNumber
from tests.engine.works import work_of

SHORT = Case("gpt-oss-20b", (600, 1_000), 32, 24)


def rounds(**figures: tuple[float, float]) -> dict[str, list[Figures]]:
    """One round of each manager, Kvell's figures first."""
    return {
        name: [{figure: pair[place] for figure, pair in figures.items()}]
        for place, name in enumerate(("kvell", "paged"))
    }


class TestCases:
    def test_a_round_draws_its_own_lengths(self) -> None:
        case = Case("any", (10, 20), 5, 50)
        assert case.prompts(1) == case.prompts(1) != case.prompts(2)
        assert {min(case.prompts(0)), max(case.prompts(0))} <= set(range(10, 21))
        assert (case.mean_tokens, case.most_tokens) == (20, 25)

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.shape)
    def test_a_pressed_pool_holds_a_quarter_under_one_page_size(self, case: Case) -> None:
        layers = read_shape(case.shape).description.layers
        layout = plan_layout(layers, pressed_bytes(layers, case), manager="paged")
        assert requests_that_fit(layout, case.mean_tokens) in (HELD, HELD + 1)

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.shape)
    def test_an_ample_pool_holds_all(self, case: Case) -> None:
        layers = read_shape(case.shape).description.layers
        for manager in ("kvell", "paged"):
            layout = plan_layout(layers, ample_bytes(layers, case), manager=manager)
            assert requests_that_fit(layout, case.most_tokens) >= WANTED

    @pytest.mark.parametrize("case", SMALL, ids=lambda case: case.shape)
    def test_a_small_shape_keeps_the_kinds_of_its_layers(self, case: Case) -> None:
        small = describe(config_of(case.shape), 2).layers
        full = read_shape(case.shape).description.layers
        assert {layer.kind for layer in small} == {layer.kind for layer in full}


class TestFigures:
    def test_a_ratio_is_of_the_same_round(self) -> None:
        two = {
            "kvell": [{"rate": 10.0}, {"rate": 30.0}, {"rate": 8.0}],
            "paged": [{"rate": 5.0}, {"rate": 10.0}, {"rate": 8.0}],
        }
        assert ratio(two, "rate") == 2.0
        assert medians(two["kvell"]) == {"rate": 10.0}

    def test_shapes_count_alike(self) -> None:
        shapes = {"a": rounds(rate=(4.0, 1.0)), "b": rounds(rate=(1.0, 1.0))}
        assert mean_ratio(shapes, "rate") == pytest.approx(2.0)

    def test_only_what_is_slower_than_three_percent_is_named(self) -> None:
        fine = rounds(ttft_seconds=(1.029, 1.0), tpot_seconds=(0.5, 1.0))
        slow = rounds(ttft_seconds=(1.05, 1.0), tpot_seconds=(1.0, 1.0))
        told = slower_without_pressure({"fine": fine, "slow": slow})
        assert told == ["slow: ttft_seconds +5.0%"]


def plan_of(*works: tuple[int, SamplingParams | None]) -> StepPlan:
    return StepPlan(
        StepNumber(1),
        work=tuple(
            work_of(str(i), i, 0, count, sampling=sampling)
            for i, (count, sampling) in enumerate(works)
        ),
    )


def test_a_step_decodes_if_all_its_requests_do() -> None:
    greedy = SamplingParams(temperature=0)
    assert is_decode(plan_of((1, greedy), (1, greedy)))
    assert not is_decode(plan_of((1, greedy), (16, greedy)))
    assert not is_decode(plan_of((1, greedy), (1, None)))
    assert not is_decode(plan_of())


def test_latencies_of_a_run_are_from_its_start() -> None:
    served = Served()
    a, b = RequestId("a"), RequestId("b")
    served.told([Tokens(a, 0, 0, (1,))], 1.0)
    served.decoded(2, 0.5)
    served.told([Tokens(a, 0, 1, (1,)), Tokens(b, 0, 0, (1,))], 3.0)
    served.decoded(1, 0.25)
    served.told([Tokens(b, 0, 1, (1,)), Finished(b, 0, "length")], 4.0)
    assert served.figures(Case("any", (1, 1), 2, 2)) == {
        "decode_tokens_per_second": 4.0,
        "output_tokens_per_second": 1.0,
        "batch": 1.5,
        "ttft_seconds": 2.0,
        "tpot_seconds": 1.5,
    }


def test_layers_with_windows_leave_room_for_more_requests() -> None:
    ours, theirs = (measured(SHORT, name, pressed=True) for name in ("kvell", "paged"))
    assert ours["batch"] > 1.4 * theirs["batch"]
    assert ours["decode_tokens_per_second"] > 1.3 * theirs["decode_tokens_per_second"]


def test_without_pressure_nobody_waits() -> None:
    ours, theirs = (measured(SHORT, name, pressed=False) for name in ("kvell", "paged"))
    assert ours["preemptions"] == theirs["preemptions"] == 0
    assert ours["tpot_seconds"] == pytest.approx(theirs["tpot_seconds"], rel=0.03)


def compared(shape: str, ours: float, theirs: float) -> dict[str, Any]:
    """The result of :func:`peers.measured` with these rates in every round."""
    [case] = peers.cases([shape])
    rounds = {
        name: [
            {"output_tokens_per_second": rate, "ttft_p50_seconds": 0.5, "tpot_p50_seconds": 0.01}
        ]
        * 3
        for name, rate in (("kvell", ours), ("vllm", theirs))
    }
    scenario = peers.Pressed(shape, case.requests, case=case)
    return {"shape": shape, **summary(scenario, rounds, None)}


def printed(found: list[dict[str, Any]]) -> str:
    console = Console(width=120, file=StringIO())
    with console.capture() as told:
        console.print(peers.table_of(found))
    return told.get()


def test_the_shapes_that_have_a_bound_are_asked_and_answer_at_length() -> None:
    assert [case.shape for case in peers.cases([])] == ["gemma3-27b", "falcon-h1-7b"]
    assert {case.output_tokens for case in peers.cases([])} == {peers.OUTPUT_TOKENS}


def test_a_round_has_the_lengths_of_its_case_and_another_round_others() -> None:
    [case] = peers.cases(["falcon-h1-7b"])
    asked = peers.Pressed("pressed", case.requests, case=case)
    rows = asked.rows(3)
    assert [row.prompt_tokens for row in rows] == case.prompts(3)
    assert {row.output_tokens for row in rows} == {case.output_tokens}
    assert case.prompts(3) != [row.prompt_tokens for row in asked.rows(4)] == case.prompts(4)
    assert not asked.is_rectangular
    assert asked.figure == "output_tokens_per_second"


def test_both_get_the_same_bytes_lengths_and_seats(monkeypatch: Any) -> None:
    started: dict[str, list[str]] = {}
    monkeypatch.setattr(peers, "kvell_server", lambda _m, _l, flags: started.update(kvell=flags))
    monkeypatch.setattr(peers, "vllm_server", lambda _p, _m, _l, flags: started.update(vllm=flags))
    [case] = peers.cases(["gemma3-27b"])
    for start in peers.starters(case, Path("model"), Path("python"), Path("logs")).values():
        start()
    kv_bytes = pressed_bytes(describe(config_of("gemma3-27b"), 2).layers, case)
    assert started["kvell"][-2:] == ["--kv-memory", f"{kv_bytes}B"]
    assert started["vllm"][-3:] == [
        "--kv-cache-memory-bytes",
        str(kv_bytes),
        "--no-enable-prefix-caching",
    ]
    assert started["kvell"][:-2] == started["vllm"][:-3]
    assert started["kvell"][:2] == ["--max-num-seqs", str(WANTED)]


def test_a_bound_is_kept_from_its_ratio_on() -> None:
    assert peers.is_kept(compared("falcon-h1-7b", 130.0, 100.0))
    assert not peers.is_kept(compared("falcon-h1-7b", 129.0, 100.0))
    assert peers.is_kept(compared("gemma3-27b", 100.0, 100.0))
    assert not peers.is_kept({"shape": "gemma3-27b", "refused": {"vllm": "no such kind"}})


def test_the_table_has_ratios_and_refusals() -> None:
    text = printed(
        [
            compared("gemma3-27b", 150.0, 100.0),
            {"shape": "falcon-h1-7b", "refused": {"vllm": "no such kind"}},
        ]
    )
    assert "1.50" in text
    assert "no such kind" in text
