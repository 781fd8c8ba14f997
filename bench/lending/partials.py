"""Attention over sections of others: milliseconds beside local attention, and bytes that travel.

Run from the repository's root: ``python -m bench.lending.partials``.  See README.md beside this
file.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.attention.decode_shapes import Shape, layers_of, random_pool
from bench.attention.paged_attention import PAGE_TOKENS, make_batch
from bench.lending.native_records import native_records
from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.native import NativeKernels
from kvell.attention.sections import SectionRecords
from kvell.vocabulary import MIB, SECTION_TOKENS

SHAPES = (Shape("smollm2", 9, 3, 64), Shape("llama3-8b", 32, 8, 128))
ROWS = (1, 8, 32)
SECTIONS = (1, 2, 4, 8, 16)
POOL_BYTES = 256 * MIB
"""That a run reads at least: larger than the caches, so layers take turns."""
WAYS = ("local", "folded", "apart", "fold")


@dataclass(frozen=True)
class Cell:
    """Decode rows of as many requests over sections of theirs, in one layer.

    :param milliseconds: of each round: ``local`` attention over the sections, ``folded`` and
        ``apart`` (one record for all sections, one for each), and the debtor's ``fold`` of the
        latter before one local page.
    :param kv_bytes: of the sections; ``query_bytes``, ``folded_bytes`` and ``apart_bytes`` are
        what travels instead.
    """

    shape: str
    rows: int
    sections: int
    milliseconds: dict[str, list[float]]
    kv_bytes: int
    query_bytes: int
    folded_bytes: int
    apart_bytes: int

    def over_local(self, way: str) -> list[float]:
        """Time as a multiple of the local one, of each round."""
        pairs = zip(self.milliseconds[way], self.milliseconds["local"], strict=True)
        return [taken / local for taken, local in pairs]

    def kv_over(self, record_bytes: int) -> float:
        """How many times as many bytes as what travels."""
        return self.kv_bytes / (self.query_bytes + record_bytes)


def behind(batch: GroupBatch, sections: int) -> GroupBatch:
    """The same tables, for query rows behind them and with so many sections before them."""
    tokens = sections * SECTION_TOKENS
    return replace(
        batch,
        context_lens=batch.context_lens + tokens + 1,
        first_positions=batch.first_positions + tokens // PAGE_TOKENS,
    )


def measured(
    shape: Shape,
    rows: int,
    sections: int,
    rounds: int,
    pool: torch.Tensor,
    clock: Callable[[], float] = time.perf_counter,
) -> Cell:
    """Time all ways in turn, over all layers that the pool holds."""
    tokens = sections * SECTION_TOKENS
    layers = layers_of(pool, shape, PAGE_TOKENS, rows * tokens)
    kernels, params = NativeKernels(), AttendParams(shape.head_size**-0.5)
    query = torch.randn(rows, shape.heads, shape.head_size, dtype=torch.bfloat16)
    batch = make_batch(rows, tokens, 1)
    first, later = behind(batch, 0), behind(batch, 1)
    page = behind(make_batch(rows, PAGE_TOKENS, 1), sections)
    apart = _apart(native_records(kernels, layers[0], later, query, params), rows, sections)
    calls: dict[str, Callable[[LayerPages], object]] = {
        "local": lambda layer: kernels.attend(layer, first, query, params),
        "folded": lambda layer: native_records(kernels, layer, first, query, params),
        "apart": lambda layer: native_records(kernels, layer, later, query, params),
        "fold": lambda layer: kernels.attend(layer, page, query, params, apart),
    }
    milliseconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            begin = clock()
            for layer in layers:
                calls[way](layer)
            milliseconds[way].append(1e3 * (clock() - begin) / len(layers))
    record_bytes = rows * shape.heads * (2 + shape.head_size) * 4
    return Cell(
        shape.name,
        rows,
        sections,
        {way: taken[1:] for way, taken in milliseconds.items()},
        rows * tokens * shape.token_bytes,
        query.nbytes,
        record_bytes,
        apart.values.nbytes,
    )


def _apart(records: SectionRecords, rows: int, sections: int) -> SectionRecords:
    """Records of later sections, as those of a whole context: one for each section."""
    starts = torch.arange(rows + 1, dtype=torch.int32) * sections
    return SectionRecords(starts, records.values)


def show(console: Console, cells: Sequence[Cell]) -> None:
    """A row for each cell: medians, and ranges of the rounds."""
    table = Table(
        *("shape", "rows", "sections", "local ms", "folded / local", "apart / local", "fold ms"),
        *("KV / wire, folded", "KV / wire, apart"),
    )
    for cell in cells:
        table.add_row(
            *(cell.shape, str(cell.rows), str(cell.sections)),
            _range(cell.milliseconds["local"]),
            _range(cell.over_local("folded")),
            _range(cell.over_local("apart")),
            _range(cell.milliseconds["fold"]),
            f"{cell.kv_over(cell.folded_bytes):,.0f}",
            f"{cell.kv_over(cell.apart_bytes):,.0f}",
        )
    console.print(table)


def _range(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f}-{max(numbers):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--sections", type=int, nargs="+", default=SECTIONS)
    machine.add_clock_options(parser)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    clock = machine.chosen_clock(parser, options)
    cells = []
    for shape in SHAPES:
        section_bytes = SECTION_TOKENS * shape.token_bytes
        most = max(options.rows) * max(options.sections) * section_bytes
        pool = random_pool(max(POOL_BYTES, most))
        for rows in options.rows:
            for sections in options.sections:
                used = max(POOL_BYTES, rows * sections * section_bytes)
                cells.append(measured(shape, rows, sections, options.rounds, pool[:used], clock))
    console = Console(width=140)
    console.print(f"{machine.describe()}; {torch.get_num_threads()} threads")
    show(console, cells)
    if options.json is not None:
        report = {"machine": machine.describe(), "cells": [asdict(cell) for cell in cells]}
        result_file.write(options.json, report)


if __name__ == "__main__":
    main()
