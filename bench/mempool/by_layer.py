"""How long a request waits for its pages behind its prompt's pass: by layer, and by request.

Two processes, real passes of SmolLM2 in bfloat16; methods in turn, over both transports (MemServe
figure 12 compares them under load).  Run from the repository's root, on a machine with two
processors or more: ``OMP_NUM_THREADS=1 python -m bench.mempool.by_layer``.
"""

import argparse
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.mempool.handing import Handed, Sender, engine_at, receiving
from bench.mempool.timing import Figures, spread
from kvell.mempool.rendezvous import PageTransport, make_folder
from kvell.mempool.transfers.methods import COPIED, SENT, Streamed, pays_by_layer
from kvell.pages.stages import stages_of

METHODS = ("by_request", "by_layer")
LENGTHS = (16, 64, 256, 1024, 2048)
WARMING_TOKENS = 300
Found = dict[str, dict[str, Figures]]


def measured(transport: str, lengths: list[int], rounds: int) -> dict[str, Found]:
    """By length and method: milliseconds of passes and of the gaps behind them."""
    random = np.random.default_rng(1)
    seen: dict[tuple[int, str], list[Handed]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder)
        with receiving(folder, transport):
            senders = {one: Sender(engine_at(one, folder, transport, one)) for one in METHODS}
            for at in range(rounds + 1):
                for length in lengths if at else [WARMING_TOKENS]:
                    for method, sender in senders.items():
                        prompt = random.integers(20, 40_000, length, np.int32)
                        handed = sender.hand_over(f"{method}-{length}-{at}", prompt)
                        if at:
                            seen.setdefault((length, method), []).append(handed)
            layout = senders["by_layer"].engine.core.memory.layout
            for sender in senders.values():
                sender.engine.close()
    found: dict[str, Found] = {}
    for length in lengths:
        pages = sum(-(-length // group.page_tokens) for group in layout.groups)
        size_bytes = pages * layout.groups[0].page_stride_bytes
        found[str(length)] = {
            method: {
                "pass_ms": spread([one.pass_seconds for one in seen[length, method]], unit=1e3),
                "gap_ms": spread([one.gap_seconds for one in seen[length, method]], unit=1e3),
                "total_ms": spread([one.total_seconds for one in seen[length, method]], unit=1e3),
            }
            for method in METHODS
        }
        found[str(length)]["prompt"] = {
            "bytes": spread([size_bytes], unit=1),
            "pages": spread([pages], unit=1),
            "stages": spread([len(stages_of(layout.groups))], unit=1),
        }
    return found


def table_of(transport: str, found: dict[str, Found]) -> Table:
    """A row for each length, with what the cost model chooses."""
    costs = COPIED if transport == "memory" else SENT
    table = Table(title=f"{transport}: milliseconds, median (lowest–highest)", show_lines=True)
    table.add_column("tokens", justify="right")
    table.add_column("MB", justify="right")
    for part in ("pass", "gap", "both"):
        for method in METHODS:
            table.add_column(f"{part}, {method.replace('_', ' ')}", justify="right")
    table.add_column("chosen")
    for length, told in found.items():
        cells = [
            f"{one['median']:.1f} ({one['low']:.1f}–{one['high']:.1f})"
            for part in ("pass_ms", "gap_ms", "total_ms")
            for one in (told[method][part] for method in METHODS)
        ]
        size_bytes, pages, stages = (
            int(told["prompt"][name]["median"]) for name in ("bytes", "pages", "stages")
        )
        what = Streamed(size_bytes, pages, stages, int(length))
        chosen = "by layer" if pays_by_layer(what, costs) else "by request"
        table.add_row(length, f"{what.size_bytes / 1e6:.1f}", *cells, chosen)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transports", nargs="+", default=list(get_args(PageTransport)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, about = Console(width=140), machine.describe()
    console.print(about)
    report: dict[str, object] = {"machine": about}
    for transport in options.transports:
        found = measured(transport, options.lengths, options.rounds)
        report[transport] = found
        console.print(table_of(transport, found))
    if options.json:
        result_file.write(options.json, report)


if __name__ == "__main__":
    main()
