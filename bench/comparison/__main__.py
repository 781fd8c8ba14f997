"""The comparison page and its plots, from the files of ``bench/results``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.comparison import gpu, memory, speed
from bench.comparison.chart import draw
from bench.comparison.page import PLOTS, page
from bench.comparison.section import Section
from bench.result_file import read

RESULTS = Path(__file__).parents[1] / "results"
SECTIONS: dict[str, Callable[[Any], Section]] = {
    "zen5/side_by_side.json": speed.side_by_side,
    "zen5/side_by_side_models.json": speed.more_models,
    "zen5/engine_throughput.json": speed.libraries,
    "zen5/batch_in_memory.json": memory.batch_in_memory,
    "zen5/managers_peers.json": memory.peers_in_one_run,
    "virtual/managers.json": memory.managers,
    "virtual/waste.json": memory.packing,
    "virtual/hits.json": memory.hits,
    "h200/gpu_check.json": gpu.gpu,
    "zen5/load_agreement.json": speed.load_tools,
}
"""By file under ``bench/results``, in the order of the page; one machine of each kind."""


def sections_of(results: Path) -> tuple[list[Section], list[str]]:
    """Sections whose file exists, in order, and the names of the missing files."""
    there = {name: make for name, make in SECTIONS.items() if (results / name).exists()}
    sections = [make(read(results / name)) for name, make in there.items()]
    return sections, [name for name in SECTIONS if name not in there]


def write(results: Path) -> Path:
    """Write page and plots beside the files; delete plots that the page no longer has."""
    sections, missing = sections_of(results)
    plots = results / PLOTS
    plots.mkdir(exist_ok=True)
    for old in plots.glob("*.svg"):
        old.unlink()
    for bars in (one for section in sections for one in section.bars):
        draw(bars, plots / f"{bars.name}.svg")
    target = results / "comparison.md"
    target.write_text(page(sections, missing), encoding="utf-8")
    return target


def main(given: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the files")
    print(write(parser.parse_args(given).results))


if __name__ == "__main__":
    main()
