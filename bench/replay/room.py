"""Hits of a full pool against those of one that knew the future: too small, or badly used.

Run from the repository's root, after ``bench.replay.hits``:
``python -m bench.replay.room --traces DIR``.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.replay.foresight import Foresight, Life, lives_of
from bench.replay.hits import FULL_POOL, TRACES, YARDSTICK
from bench.replay.hits import RESULTS as HITS
from bench.replay.shapes import AMPLE_BYTES, SHAPES, layout_of, read_shape, replayed
from kvell.memory import GroupKind, GroupSpec
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import read_trace

RESULTS = result_file.path_of("room", result_file.VIRTUAL)
TRACE = "mooncake-conversation"
PARTS = (1, 4, 16)
"""Divisors of the room that running requests leave, for each of which the bound is computed."""


@dataclass(frozen=True)
class Ample:
    """A run with ample memory.

    :param needed_bytes: int64 [steps + 1], of running requests, by step.
    """

    groups: tuple[GroupSpec, ...]
    lives: list[Life]
    needed_bytes: npt.NDArray[np.int64]

    @property
    def pool_bytes(self) -> int:
        """Bytes of a full pool."""
        return int(FULL_POOL * self.needed_bytes[1:].mean())


@dataclass(frozen=True)
class Room:
    """One shape in its full pool.

    :param of_yardstick: hit tokens, as a part of what the yardstick hits.
    :param bounds: the most that they could be with the future known, for each of ``PARTS``.
    :param all_resumable: bytes, as a part of the pool, to hold at the worst step the history that
        the yardstick holds, with windows and states to resume every prompt.
    """

    shape: str
    of_yardstick: float
    bounds: tuple[float, ...]
    all_resumable: float


def ample(name: str, rows: Sequence[TraceRow]) -> Ample:
    """Replay with ample memory."""
    shape = read_shape(name)
    layout = layout_of(shape, AMPLE_BYTES)
    _, run = replayed(shape, layout, rows)
    needed = [0, *(sum(g.needed_bytes for g in s.groups) for s in run.means.samples)]
    return Ample(layout.groups, lives_of(run), np.asarray(needed, np.int64))


def bounds(run: Ample, rows: Sequence[TraceRow]) -> list[float]:
    """Most tokens hit, for each of ``PARTS`` of the room."""
    room = run.pool_bytes - run.needed_bytes
    return [Foresight(run.groups, rows, run.lives, room // part).hit_tokens() for part in PARTS]


def all_resumable(run: Ample, yardstick: Ample, rows: Sequence[TraceRow]) -> float:
    """``all_resumable`` of :class:`Room`; running prompts count only what windows have left."""
    history = (yardstick.pool_bytes - yardstick.needed_bytes) / _token_bytes(yardstick.groups)
    prompt = sum(row.prompt_tokens for row in rows) / len(rows)
    most = 0.0
    for step in range(1, len(run.needed_bytes)):
        running = [life for life in run.lives if life.answers <= step < life.ends]
        finished = [
            r.prompt_tokens for r, life in zip(rows, run.lives, strict=True) if life.ends <= step
        ]
        tokens = min(float(history[step]), float(sum(finished)))
        ends = sum(_end_bytes(run.groups, step - life.answers) for life in running)
        ends += tokens / prompt * _end_bytes(run.groups, prompt)
        held = run.needed_bytes[step] + tokens * _token_bytes(run.groups) + ends
        most = max(most, float(held))
    return most / run.pool_bytes


def _token_bytes(groups: Sequence[GroupSpec]) -> float:
    full = (g for g in groups if g.kind is GroupKind.FULL)
    return sum(g.page_stride_bytes / g.page_tokens for g in full)


def _end_bytes(groups: Sequence[GroupSpec], most_tokens: float) -> float:
    """Bytes of states and of at most ``most_tokens`` tokens of windows."""
    found = 0.0
    for group in groups:
        if group.kind is GroupKind.STATE:
            found += group.page_stride_bytes * group.slices
        elif group.kind is not GroupKind.FULL:
            tokens = min(group.window_tokens - 1, most_tokens)
            found += group.page_stride_bytes / group.page_tokens * tokens
    return found


def measure(names: Sequence[str], rows: Sequence[TraceRow], hits: Path) -> list[Room]:
    """Measure each shape against its bound."""
    runs = [pair["full"] for pair in json.loads(hits.read_text())["traces"]]
    rates = {run["shape"]: run["hit_rate"] for run in runs if run["trace"] == TRACE}
    yardstick = ample(YARDSTICK, rows)
    tokens = rates[YARDSTICK] * sum(row.prompt_tokens for row in rows)
    found = []
    for name in names:
        run = yardstick if name == YARDSTICK else ample(name, rows)
        most = tuple(bound / tokens for bound in bounds(run, rows))
        need = all_resumable(run, yardstick, rows)
        found.append(Room(name, rates[name] / rates[YARDSTICK], most, need))
    return found


def asked(about: str | None, out: Path) -> argparse.Namespace:
    """Arguments of the benches that use the full pools of ``bench.replay.hits``."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--shape", action="append", default=[], help="only this shape")
    parser.add_argument("--hits", type=Path, default=HITS, help="what bench.replay.hits wrote")
    parser.add_argument("--out", type=Path, default=out, help="where the JSON goes")
    return parser.parse_args()


def rows_of(traces: Path) -> list[TraceRow]:
    """The requests that those benches replay."""
    return read_trace(traces / f"{TRACE}.jsonl.gz", TRACES[TRACE])


def main() -> None:
    """Measure, print and write JSON."""
    args = asked(__doc__, RESULTS)
    rows = rows_of(args.traces)
    found = measure(args.shape or SHAPES, rows, args.hits)
    table = Table(title=f"{TRACE}, full pool: hits as a part of {YARDSTICK}'s")
    for column in (
        "shape",
        "now",
        *(f"bound, room/{part}" for part in PARTS),
        "all resumable / pool",
    ):
        table.add_column(column)
    for room in found:
        cells = (f"{part:.3f}" for part in (room.of_yardstick, *room.bounds, room.all_resumable))
        table.add_row(room.shape, *cells)
    Console(width=120).print(table)
    result_file.write(args.out, [asdict(room) for room in found], processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
