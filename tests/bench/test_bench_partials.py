"""What is timed of attention over sections of others, and the bytes that travel."""

from io import StringIO
from itertools import count

import pytest
import torch
from rich.console import Console

from bench.attention.decode_shapes import Shape
from bench.attention.paged_attention import PAGE_TOKENS, make_batch
from bench.lending.partials import WAYS, Cell, behind, measured, show
from kvell.vocabulary import SECTION_TOKENS

SMALL = Shape("small", 4, 2, 16)


def cell(rows: int, sections: int) -> Cell:
    pool = torch.zeros(rows * sections * SECTION_TOKENS * SMALL.token_bytes, dtype=torch.uint8)
    return measured(SMALL, rows, sections, 2, pool, clock=count().__next__)


def test_all_ways_are_timed_in_every_round() -> None:
    milliseconds = cell(3, 2).milliseconds
    assert {way: len(taken) for way, taken in milliseconds.items()} == dict.fromkeys(WAYS, 2)
    assert set(milliseconds["apart"]) == {1000.0}, "begun at one tick, ended at the next"


@pytest.mark.parametrize("sections", [1, 3])
def test_bytes_are_those_of_the_layouts(sections: int) -> None:
    found = cell(2, sections)
    record = 2 * 4 * (2 + 16) * 4
    assert (found.folded_bytes, found.apart_bytes) == (record, sections * record)
    assert found.query_bytes == 2 * 4 * 16 * 2
    assert found.kv_bytes == 2 * sections * SECTION_TOKENS * (2 * 2 * 16 * 2)


def test_a_ratio_is_of_neighbouring_runs() -> None:
    timed = Cell("a", 1, 1, {"local": [1.0, 4.0], "apart": [2.0, 4.0]}, 600, 100, 200, 400)
    assert timed.over_local("apart") == [2.0, 1.0]
    assert (timed.kv_over(timed.folded_bytes), timed.kv_over(timed.apart_bytes)) == (2.0, 1.2)


def test_query_rows_stand_behind_the_tables() -> None:
    batch = behind(make_batch(2, 2 * SECTION_TOKENS, 1), 1)
    assert batch.context_lens.tolist() == [3 * SECTION_TOKENS + 1] * 2
    assert batch.first_positions.tolist() == [SECTION_TOKENS // PAGE_TOKENS] * 2


def test_a_row_shows_medians_and_ranges() -> None:
    console = Console(width=200, record=True, file=StringIO())
    milliseconds = {"local": [1.0, 2.0, 4.0], "folded": [1.0, 2.0, 8.0]}
    milliseconds |= {"apart": [3.0, 6.0, 12.0], "fold": [0.5, 0.25, 0.75]}
    show(console, [Cell("llama", 8, 16, milliseconds, 90_000, 100, 200, 800)])
    [row] = (line for line in console.export_text().splitlines() if "llama" in line)
    for text in ("2.00 (1.00-4.00)", "1.00 (1.00-2.00)", "3.00 (3.00-3.00)", "0.50 (0.25-0.75)"):
        assert text in row
    assert row.split("│")[-3].strip() == "300" and row.split("│")[-2].strip() == "100"
