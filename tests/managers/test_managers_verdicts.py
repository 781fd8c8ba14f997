"""What the matrix is judged by."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from bench.managers.__main__ import tables
from bench.managers.cells import DIVISIONS
from bench.managers.verdicts import Comparison, Verdict, complete, refusals, verdicts

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
