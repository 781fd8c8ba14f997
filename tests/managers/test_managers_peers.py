"""Bounds of the comparison with vLLM's manager, from figures that are made up."""

import io

import pytest
from rich.console import Console

from bench.managers.peers import Row, problems, table_of


def figures(us: float, batch: float = 50.0) -> dict[str, float]:
    return {
        "manager_us_per_request_step": us,
        "batch_mean": batch,
        "steps": 10,
        "hit_rate": 0.0,
        "waste": 0.01,
    }


def row(ours: float, theirs: float, shape: str = "llama3-8b", batch: float = 50.0) -> Row:
    runs = {"decodes-first": [figures(theirs), figures(theirs + 9)]}
    return Row(shape, "azure-2023-conv", 6, [figures(ours + 9, batch), figures(ours, batch)], runs)  # type: ignore[arg-type]


class TestBounds:
    @pytest.mark.parametrize(
        ("ours", "theirs", "kept"),
        [(2.0, 20.0, True), (2.1, 20.0, False), (6.6, 19.9, True), (6.7, 19.9, False)],
    )
    def test_a_tenth_of_a_slow_manager_and_a_third_of_a_fast_one(
        self, ours: float, theirs: float, kept: bool
    ) -> None:
        assert (list(problems([row(ours, theirs)])) == []) is kept

    def test_the_best_run_of_each_side_counts(self) -> None:
        one = row(1.0, 30.0)
        assert (one.ours_us, one.theirs_us) == (1.0, 30.0)

    def test_what_was_missed_is_named(self) -> None:
        missed = list(problems([row(5.0, 30.0), row(0.1, 30.0, "jamba-mini", batch=96.5)]))
        assert missed == [
            "llama3-8b on azure-2023-conv: 5.00 µs, 3.00 allowed",
            "jamba-mini on azure-2023-conv: batch 96.5, 97 asked",
        ]

    def test_the_table_has_both_sides(self) -> None:
        console = Console(width=160, file=io.StringIO(), record=True)
        console.print(table_of([row(0.5, 30.0)]))
        text = console.export_text()
        assert "0.50 / 30.0" in text
        assert "1/60" in text
