"""Large pages of both sizes over one trace: the same work, fewer prompts cut."""

import pytest

from bench.elastic.offline import CHUNK_BYTES
from bench.elastic.stuck import SHAPES, Figures, layouts, line, replayed
from bench.replay.shapes import read_shape
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import MIB


@pytest.fixture(scope="module")
def both() -> tuple[Figures, Figures]:
    """More requests than fit, of lengths that make their pages free at different times."""
    shape = read_shape("gpt-oss-20b")
    rows = [TraceRow(0.0, 200 + 37 * (n % 11), 90 + 60 * (n % 7)) for n in range(160)]
    own, covering = (replayed(shape, one, rows, "made up") for one in layouts(shape, 900 * MIB))
    return own, covering


@pytest.mark.long
def test_a_large_page_holds_a_chunk(both: tuple[Figures, Figures]) -> None:
    own, covering = both
    assert own.large_page_kib * 1024 < CHUNK_BYTES <= covering.large_page_kib * 1024


@pytest.mark.long
def test_fewer_prompts_wait_for_chunks(both: tuple[Figures, Figures]) -> None:
    own, covering = both
    assert covering.cut < own.cut
    assert covering.steps < own.steps
    assert covering.batch_mean > own.batch_mean
    assert f"{own.cut:,} cut" in line(own)


@pytest.mark.parametrize("name", SHAPES)
def test_both_sizes_divide_nearly_all_of_the_pool(name: str) -> None:
    for layout in layouts(read_shape(name), 1024 * MIB):
        assert layout.pool_bytes > 0.98 * 1024 * MIB
