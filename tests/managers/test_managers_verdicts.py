"""What the matrix is judged by."""

import io

import pytest
from rich.console import Console

from bench.managers.cells import Cell
from bench.managers.report import printed
from bench.managers.verdicts import Comparison, Verdict, comparisons, refusals, verdicts
from tests.managers.outcomes import MIXED, PLACE, PLAIN, compared, ran

RUNS, STEPS, FEWER, COULD, HITS, SAME = range(6)


def judged(*cells: Comparison) -> list[Verdict]:
    return verdicts(cells)


class TestRuns:
    def test_a_cell_that_runs_to_its_end_holds(self) -> None:
        assert judged(compared())[RUNS].holds

    def test_a_refused_cell_is_missed_with_its_reason(self) -> None:
        verdict = judged(compared(kvell={"refused": "too small"}))[RUNS]
        assert list(verdict.missed.values()) == ["too small"]

    def test_refusing_one_request_is_missed(self) -> None:
        verdict = judged(compared(kvell=ran(requests_refused=1)))[RUNS]
        assert list(verdict.missed.values()) == ["1 requests refused"]

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

    def test_ours_must_be_complete_to_be_compared(self) -> None:
        verdict = judged(compared(kvell=ran(10, requests_refused=5)))[STEPS]
        assert list(verdict.missed.values()) == ["not all requests"]

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
        other = Comparison((*PLACE[:2], 16), same.kinds, same.outcomes)
        verdict = judged(*[fewer] * 4, other)[FEWER]
        assert verdict.part == pytest.approx(0.8)
        assert verdict.holds

    def test_who_cannot_run_it_is_beaten(self) -> None:
        gone = {"refused": "no room"}
        assert judged(compared(paged=ran(110), max_page=gone, kvell=ran(100)))[FEWER].holds


class TestWhereAnIdealPackerIsAhead:
    @pytest.mark.parametrize(("ideal", "asked"), [(97, 1), (98, 0)])
    def test_only_those_cells_are_asked(self, ideal: int, asked: int) -> None:
        assert judged(compared(ideal=ran(ideal)))[COULD].compared == asked

    def test_without_an_ideal_nothing_is_known(self) -> None:
        assert judged(compared(paged=ran(200)))[COULD].compared == 0

    def test_ours_must_be_ahead_there_too(self) -> None:
        assert not judged(compared(ideal=ran(90)))[COULD].holds
        assert judged(compared(ideal=ran(90), kvell=ran(95)))[COULD].holds

    def test_the_ideal_is_nobody_to_beat(self) -> None:
        assert judged(compared(ideal=ran(10, hit_rate=0.9)))[STEPS].holds
        assert judged(compared(ideal=ran(10, hit_rate=0.9)))[HITS].holds


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
        assert comparisons({Cell(*PLACE, "kvell"): ran()}, {PLACE[0]: MIXED}) == []

    def test_refusals_say_who_and_why(self) -> None:
        one = compared(static={"refused": "no room"}, max_page=ran(requests_refused=2))
        assert list(refusals([one])) == [
            (one.name, "max-page", "2 requests are longer than it can hold"),
            (one.name, "static", "no room"),
        ]


class TestReport:
    def test_tables_name_what_was_missed(self) -> None:
        cells = [compared(kvell=ran(150), static={"refused": "no room"})]
        console = Console(width=160, file=io.StringIO(), record=True)
        for table in printed(cells, verdicts(cells)):
            console.print(table)
        text = console.export_text()
        assert "1.5000 × jenga" in text
        assert "no room" in text
