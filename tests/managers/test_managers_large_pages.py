"""What other sizes of the large page are tried, and what is told of them."""

import gzip
import io
from pathlib import Path

from rich.console import Console

from bench.managers.large_pages import Case, Figures, choices, mean, replay, table
from bench.managers.matrix import shape_of
from kvell.memory import plan_layout
from kvell.vocabulary import GIB, MIB


def test_each_size_is_tried_once_and_the_chosen_one_first() -> None:
    layout = plan_layout(shape_of("nemotron-h-8b").description.layers, 6 * GIB)
    sizes = choices(layout)
    assert list(sizes) == ["chosen", "1 %", "5 %"]
    assert sizes["chosen"] == layout.large_page_bytes
    assert sizes["5 %"] < sizes["chosen"] < sizes["1 %"]


def test_a_size_that_others_choose_too_is_no_other() -> None:
    layout = plan_layout(shape_of("zamba2-7b").description.layers, 100 * GIB)
    assert list(choices(layout)) == ["chosen", "1 %"]


def test_means_are_of_each_figure() -> None:
    found = mean([Figures(10, 0.5, 0.125, 0.0), Figures(20, 1.0, 0.375, 0.5)])
    assert found == Figures(15, 0.75, 0.25, 0.25)


def test_a_row_stands_beside_its_own_chosen_size() -> None:
    cases = [Case("a", trace, rule, 3 * MIB) for trace in "xy" for rule in ("chosen", "1 %")]
    steps = (100, 110, 200, 190)
    found = {case: Figures(n, 0.5, 0.1, 0.0) for case, n in zip(cases, steps, strict=True)}
    console = Console(file=io.StringIO(), width=140)
    console.print(table(found))
    assert isinstance(console.file, io.StringIO)
    rows = [
        line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if "3.00" in line
    ]
    assert [row[5].strip() for row in rows] == ["1.0000", "1.1000", "1.0000", "0.9500"]


def test_a_case_is_replayed_with_its_own_size(tmp_path: Path) -> None:
    lines = [
        f'{{"arrival_s": {at}, "prompt_tokens": 900, "output_tokens": 5,'
        f' "block_hashes": [{at}], "block_tokens": 512}}'
        for at in range(12)
    ]
    trace = tmp_path / "coding-assistant.jsonl.gz"
    trace.write_bytes(gzip.compress("\n".join(lines).encode()))
    small, large = (
        replay(tmp_path, (Case("jamba-mini", "coding-assistant", "given", size), 1.0))
        for size in (1_574_400, 32 * MIB)
    )
    assert small is not None
    assert large is not None
    assert small.steps > 5
    assert large.stranded > small.stranded
