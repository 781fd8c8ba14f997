"""Hits that a full pool loses against an attention-only shape, by cause.

For the pools of ``bench.replay.hits`` on mooncake-conversation, after it. A prompt's lost tokens
count as *forked* if it parts from the one that it shares most with more than a block before that
one's end: keys and values may be cached, but no state or window to resume from is kept so far from
a prompt's end. All other losses are *displaced*: states and windows took the room.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.replay.hits import YARDSTICK
from bench.replay.room import TRACE, asked, rows_of
from bench.replay.shapes import layout_of, read_shape, replayed
from kvell.simulator.traces.rows import TraceRow

RESULTS = result_file.path_of("losses", result_file.VIRTUAL)
LOSING = ("gemma3-27b", "qwen3-next", "nemotron-h-8b")


@dataclass(frozen=True)
class Losses:
    """Losses of one shape, as parts of the yardstick's hits.

    :param hits: its hits.
    :param forked: lost by prompts that part from an earlier one in its midst.
    :param forks: number of such prompts.
    :param displaced: lost by all others.
    """

    shape: str
    hits: float
    forked: float
    forks: int
    displaced: float


def is_fork(rows: Sequence[TraceRow], index: int) -> bool:
    """Whether the prompt parts in its midst from each earlier one that it shares most with."""
    ids = [row.block_ids.tolist() for row in rows[: index + 1]]
    shared = [_shared(ids[index], other) for other in ids[:index]]
    most = max(shared, default=0)
    ends = [len(other) for other, n in zip(ids[:index], shared, strict=True) if n == most]
    return bool(most) and all(end > most + 1 for end in ends)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    same = (a == b for a, b in zip(one, other, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(one), len(other)))


def hit_tokens(name: str, pool_bytes: int, rows: Sequence[TraceRow]) -> list[int]:
    """Hit tokens of each request in a pool of that size."""
    shape = read_shape(name)
    _, run = replayed(shape, layout_of(shape, pool_bytes), rows)
    return [request.hit_tokens or 0 for request in run.requests]


def losses(
    name: str, ours: Sequence[int], yardstick: Sequence[int], rows: Sequence[TraceRow]
) -> Losses:
    """Compare two runs request by request."""
    total = sum(yardstick)
    lost = [max(0, theirs - mine) for mine, theirs in zip(ours, yardstick, strict=True)]
    forks = [i for i, tokens in enumerate(lost) if tokens and is_fork(rows, i)]
    forked = sum(lost[i] for i in forks)
    return Losses(name, sum(ours) / total, forked / total, len(forks), (sum(lost) - forked) / total)


def main() -> None:
    """Measure, print and write JSON."""
    args = asked(__doc__, RESULTS)
    rows = rows_of(args.traces)
    runs = [pair["full"] for pair in json.loads(args.hits.read_text())["traces"]]
    pools = {run["shape"]: run["pool_bytes"] for run in runs if run["trace"] == TRACE}
    yardstick = hit_tokens(YARDSTICK, pools[YARDSTICK], rows)
    found = [
        losses(name, hit_tokens(name, pools[name], rows), yardstick, rows)
        for name in args.shape or LOSING
    ]
    table = Table(title=f"{TRACE}, full pool, as parts of {YARDSTICK}'s hits")
    for column in ("shape", "hits", "lost: forked", "prompts", "lost: displaced"):
        table.add_column(column)
    for one in found:
        cells = (f"{one.hits:.3f}", f"{one.forked:.3f}", str(one.forks), f"{one.displaced:.3f}")
        table.add_row(one.shape, *cells)
    Console(width=120).print(table)
    result_file.write(args.out, [asdict(one) for one in found], processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
