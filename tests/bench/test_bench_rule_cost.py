"""Two rules side by side do what each does alone; a rule's cost is a part of the time with it."""

import numpy as np
import pytest

from bench.replay.rule_cost import RULES, share, side_by_side
from bench.replay.shapes import Shape, layout_of, read_shape, replay_of, replayed
from kvell.memory import Layout
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import GIB

ROWS = [
    TraceRow(float(number), prompt_tokens, 5 + number, np.array(blocks, np.int64), 512)
    for number, (prompt_tokens, blocks) in enumerate(
        [(1500, (1, 2, 3)), (900, (4, 5)), (1500, (1, 2, 6)), (2000, (7, 8, 9, 10))]
    )
]


@pytest.fixture(scope="module")
def shape() -> Shape:
    return read_shape("llama3-8b")


@pytest.fixture(scope="module")
def layout(shape: Shape) -> Layout:
    return layout_of(shape, GIB)


def test_runs_side_by_side_end_as_they_do_alone(shape: Shape, layout: Layout) -> None:
    runs = [replay_of(shape, layout, rows, eviction="lru") for rows in (ROWS, ROWS[:1])]
    side_by_side(runs)
    for run, rows in zip(runs, (ROWS, ROWS[:1]), strict=True):
        alone, _ = replayed(shape, layout, rows)
        assert run.report()["requests_finished"] == len(rows)
        for name in ("steps", "hit_rate", "output_tokens", "virtual_seconds"):
            assert run.report()[name] == alone[name]
        assert run.report()["wall_seconds"] > 0


def test_an_ended_run_goes_on_no_further(shape: Shape, layout: Layout) -> None:
    run = replay_of(shape, layout, ROWS)
    run.run()
    steps = run.report()["steps"]
    assert not run.go_on()
    assert run.report()["steps"] == steps


def test_a_rule_costs_a_part_of_the_time_with_it() -> None:
    found = dict(zip(RULES, ([9.0, 6.0, 10.0], [10.0, 8.0, 10.0]), strict=True))
    assert share(found) == pytest.approx({"best": 0.0, "median": 0.1, "worst": 0.25})
