"""The comparison page and its plots, from the files of ``bench/results``."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.comparison import gpu, memory, speed
from bench.comparison.chart import draw
from bench.comparison.page import PLOTS, page
from bench.comparison.section import Section

RESULTS = Path(__file__).parents[1] / "results"
SECTIONS: dict[str, Callable[[Any], Section]] = {
    "side_by_side.json": speed.side_by_side,
    "side_by_side_models.json": speed.more_models,
    "engine_throughput.json": speed.libraries,
    "batch_in_memory.json": memory.batch_in_memory,
    "managers_peers.json": memory.peers_in_one_run,
    "replay_peers.json": memory.peers,
    "managers.json": memory.managers,
    "waste.json": memory.packing,
    "hits.json": memory.hits,
    "gpu_check.json": gpu.gpu,
    "load_agreement.json": speed.load_tools,
}
SUPERSEDED = {"replay_peers.json": "managers_peers.json"}
"""Files that answer what a better one answers, if that is there."""


def sections_of(results: Path) -> tuple[list[Section], list[str]]:
    """What there is, in order, and the names of files that are missing."""
    exists = {name for name in SECTIONS if (results / name).exists()}
    asked = {name: make for name, make in SECTIONS.items() if SUPERSEDED.get(name) not in exists}
    there = {name: make for name, make in asked.items() if name in exists}
    sections = [make(json.loads((results / name).read_text())) for name, make in there.items()]
    return sections, [name for name in asked if name not in there]


def write(results: Path) -> Path:
    """Page and plots beside the files; plots of earlier pages that it no longer has go."""
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
