"""What the matrix is judged by; its suites, the memory of their cases, and the driver."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.managers import __main__ as driver
from bench.managers.__main__ import tables
from bench.managers.cells import (
    DIVISIONS,
    MATRIX_TRACES,
    SHAPES,
    SUITES,
    VLLM,
    Case,
    Suite,
    kinds,
    memory_bytes,
    memory_flag,
)
from bench.managers.theirs import PEER_SHAPES
from bench.managers.verdicts import Comparison, Verdict, complete, refusals, verdicts
from bench.replay.command import replayed
from bench.replay.shapes import read_shape
from kvell.memory import longest_request, plan_layout
from tests.simulator.replays import row

MIXED, PLAIN = ("full", "sliding"), ("full",)


def ran(steps: int = 100, **more: Any) -> dict[str, Any]:
    """A cell that ran to its end."""
    figures = {
        "requests_finished": 10,
        "requests_refused": 0,
        "steps": steps,
        "batch_mean": 5.0,
        "hit_rate": 0.1,
        "short_of_memory": 0.5,
        "waste": 0.01,
        "preemptions": 0,
        "decisions": "same",
    }
    return figures | more


def compared(kinds: tuple[str, ...] = MIXED, **outcomes: dict[str, Any]) -> Comparison:
    """All divisions of memory in one case, alike but for those given; ``_`` stands for ``-``."""
    given = {name.replace("_", "-"): outcome for name, outcome in outcomes.items()}
    return Comparison("gemma3-27b", kinds, {name: ran() for name in DIVISIONS} | given)


RUNS, STEPS, FEWER, HITS, SAME = range(5)


def judged(*cells: Comparison) -> list[Verdict]:
    return verdicts(cells)


class TestRuns:
    def test_a_cell_that_runs_to_its_end_holds(self) -> None:
        assert judged(compared())[RUNS].holds

    def test_a_refused_cell_is_missed_with_its_reason(self) -> None:
        verdict = judged(compared(kvell={"refused": "too small"}))[RUNS]
        assert list(verdict.missed.values()) == ["too small"]

    def test_no_cell_at_all_proves_nothing(self) -> None:
        assert not any(verdict.holds for verdict in verdicts([]))


class TestSteps:
    @pytest.mark.parametrize(("steps", "holds"), [(101, True), (102, False), (90, True)])
    def test_a_hundredth_more_than_the_best_is_allowed(self, steps: int, holds: bool) -> None:
        assert judged(compared(kvell=ran(steps)))[STEPS].holds is holds

    def test_the_best_is_named(self) -> None:
        verdict = judged(compared(jenga=ran(80)))[STEPS]
        assert list(verdict.missed.values()) == ["1.2500 × jenga"]

    def test_vllm_counts_among_the_others(self) -> None:
        assert not judged(compared(vllm=ran(80)))[STEPS].holds

    def test_who_refused_requests_is_not_beaten(self) -> None:
        few = ran(10, requests_refused=5)
        assert judged(compared(static=few, jenga={"refused": "no room"}))[STEPS].holds

    def test_a_request_that_ours_refuses_too_may_be_refused(self) -> None:
        long = compared(kvell=ran(200, requests_refused=1), static=ran(100, requests_refused=1))
        assert not judged(long)[STEPS].holds

    def test_one_cell_is_enough_to_miss(self) -> None:
        verdict = judged(*[compared()] * 99, compared(kvell=ran(200)))[STEPS]
        assert verdict.compared == 100
        assert not verdict.holds


class TestFewer:
    @pytest.mark.parametrize(("steps", "holds"), [(97, True), (98, False)])
    def test_three_in_a_hundred(self, steps: int, holds: bool) -> None:
        assert judged(compared(kvell=ran(steps)))[FEWER].holds is holds

    def test_both_must_be_beaten(self) -> None:
        assert not judged(compared(kvell=ran(95), max_page=ran(96)))[FEWER].holds

    def test_others_are_not_asked(self) -> None:
        assert judged(compared(kvell=ran(97), jenga=ran(97), static=ran(90)))[FEWER].holds

    def test_only_where_layers_differ_and_paged_is_short_of_memory(self) -> None:
        rich = compared(paged=ran(short_of_memory=0.19))
        short = compared(paged=ran(short_of_memory=0.2))
        assert judged(rich, compared(PLAIN), short)[FEWER].compared == 1

    def test_four_cells_in_five_are_enough(self) -> None:
        fewer, same = compared(kvell=ran(90)), compared()
        other = replace(same, name="another")
        verdict = judged(*[fewer] * 4, other)[FEWER]
        assert verdict.share == pytest.approx(0.8)
        assert verdict.holds

    def test_who_cannot_run_it_is_beaten(self) -> None:
        gone = {"refused": "no room"}
        assert judged(compared(paged=ran(110), max_page=gone, kvell=ran(100)))[FEWER].holds


class TestHits:
    @pytest.mark.parametrize(("rate", "holds"), [(0.096, True), (0.094, False)])
    def test_half_a_point_behind_the_best_is_allowed(self, rate: float, holds: bool) -> None:
        assert judged(compared(kvell=ran(hit_rate=rate)))[HITS].holds is holds

    def test_how_far_behind_whom(self) -> None:
        verdict = judged(compared(vllm=ran(hit_rate=0.3)))[HITS]
        assert list(verdict.missed.values()) == ["0.2000 behind vllm"]


class TestSameDecisions:
    def test_asked_of_full_attention_alone(self) -> None:
        other = compared(kvell=ran(decisions="other"))
        assert judged(other)[SAME].compared == 0

    def test_another_decision_is_missed(self) -> None:
        plain = compared(PLAIN, kvell=ran(decisions="other"))
        assert not judged(plain)[SAME].holds
        assert judged(compared(PLAIN))[SAME].holds

    def test_two_refusals_are_no_decisions(self) -> None:
        gone = {"refused": "no room"}
        assert not judged(compared(PLAIN, kvell=gone, paged=gone))[SAME].holds


class TestComparisons:
    def test_incomplete_ones_wait(self) -> None:
        assert complete([Comparison("one", MIXED, {"kvell": ran()})]) == []

    def test_refusals_say_who_and_why(self) -> None:
        one = compared(static={"refused": "no room"}, max_page=ran(requests_refused=2))
        assert list(refusals([one])) == [
            f"{one.name}, max-page: 2 requests too long",
            f"{one.name}, static: no room",
        ]


def test_tables_name_what_was_missed() -> None:
    cells = [compared(kvell=ran(150), static={"refused": "no room"})]
    console = Console(width=200, file=io.StringIO(), record=True)
    for table in tables(cells, {cells[0].name: 0.2}, verdicts(cells)):
        console.print(table)
    text = console.export_text()
    assert "1.5000 × jenga" in text and "refused" in text
    assert "0.500" in text, "a tenth of the tokens is half of what an endless cache hits"


class TestSuites:
    def test_vllm_replays_the_peers_shapes_alone(self) -> None:
        theirs = [case for case, policy in SUITES["matrix"].cells() if policy in VLLM]
        assert len(theirs) == len(PEER_SHAPES) * len(MATRIX_TRACES) * 3 * 2
        assert {case.shape for case in theirs} == set(PEER_SHAPES)

    def test_policies_of_a_case_follow_one_another(self) -> None:
        for suite in SUITES.values():
            cases = [case for case, _ in suite.cells()]
            pairs = zip([None, *cases], cases, strict=False)
            assert len(set(cases)) == sum(before != after for before, after in pairs)

    @pytest.mark.parametrize("name", SUITES)
    def test_names_tell_cases_apart(self, name: str) -> None:
        cases = SUITES[name].cases
        assert len({case.name for case in cases}) == len(cases)


class TestMemory:
    def test_mean_requests_in_whole_pages_of_paged(self) -> None:
        page_bytes = 24 * 2 * 8 * 64 * 2 * 16
        rows = [row(16, 1), row(31, 1), row(32, 1)]  # 2, 2 and 3 pages
        assert memory_bytes(read_shape("gpt-oss-20b"), rows, 6) == 14 * page_bytes

    def test_room_for_the_longest_at_least(self) -> None:
        shape = read_shape("gemma3-27b")
        rows = [row(10, 1) for _ in range(99)] + [row(5000, 1)]
        layout = plan_layout(
            shape.description.layers, memory_bytes(shape, rows, 8), manager="paged"
        )
        assert longest_request(layout, 1 << 20, 64) >= 5001

    def test_a_size_in_mean_requests_or_as_it_is(self, tmp_path: Path) -> None:
        case = Case("gpt-oss-20b", "chat", 5, "24GiB")
        assert memory_flag(case, tmp_path) == "24GiB"
        flag = memory_flag(Case("gpt-oss-20b", "chat", 5, "8x"), tmp_path)
        assert flag.endswith("B") and int(flag[:-1]) > 1 << 20


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_runs_under_every_division(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "CACHE", tmp_path)
    runner, case = driver.Runner(tmp_path, None, None), Case(name, "chat", 4, "8x")
    outcomes = {policy: runner.outcome(case, policy) or {} for policy in DIVISIONS}
    ran, steps, _, _, same = verdicts([Comparison(name, kinds(read_shape(name)), outcomes)])
    assert not (ran.missed or steps.missed or same.missed)
    assert outcomes["kvell"]["requests_finished"] == 4


def test_memory_that_holds_no_request_is_a_refusal() -> None:
    report = replayed("--trace", "chat", "--limit", 1, "--model", "llama3-8b", "--kv-memory", "9B")
    assert "--kv-memory" in report["refused"]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A driver of one small suite, and the policies that were replayed."""
    asked: list[str] = []

    def counted(*words: Any) -> dict[str, Any]:
        asked.append(" ".join(map(str, words)))
        return replayed(*words)

    case = Case("gpt-oss-20b", "chat", 6, "full", 1)
    monkeypatch.setitem(SUITES, "hits", Suite((case,), ("kvell", "paged")))
    monkeypatch.setattr(driver, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(driver, "replayed", counted)
    return asked


def test_cells_are_replayed_once_and_written(
    suite: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        driver.main(["hits", "--traces", str(tmp_path), "--json", str(tmp_path / "hits.json")])
        assert len(suite) == 3, "the ample run, and one of each policy in the full pool"
    written = json.loads((tmp_path / "hits.json").read_text())
    (outcomes,) = written["cells"].values()
    assert list(outcomes) == ["kvell", "paged"]
    assert outcomes["kvell"]["requests_finished"] == 6
    assert 0 < outcomes["kvell"]["hit_rate"] <= max(written["endless_hit_rates"].values())
    assert "gpt-oss-20b" in capsys.readouterr().out


def test_vllm_is_left_out_without_its_environment(suite: list[str], tmp_path: Path) -> None:
    runner = driver.Runner(tmp_path, 2, None)
    assert runner.outcome(SUITES["hits"].cases[0], "vllm") is None
    assert suite == []


def test_a_changed_source_is_another_fingerprint(tmp_path: Path) -> None:
    source = tmp_path / "src" / "kvell" / "x.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    before = driver.fingerprint(tmp_path)
    assert driver.fingerprint(tmp_path) == before
    source.write_text("2")
    assert driver.fingerprint(tmp_path) != before
