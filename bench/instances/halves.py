"""Two instances with half the KV memory each, beside one with all of it, on the same processors.

Servers over HTTP in turn, loaded by ``kvell bench serve``:

``python -m bench.instances.halves --rounds 3``
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.side_by_side.processes import SystemProcess, descendants
from kvell.device.process_size import process_bytes
from kvell.vocabulary import MIB

MODEL = "smollm2"
START_SECONDS = 120.0
KVELL = [sys.executable, "-m", "kvell.cli.main"]


def flags(instances: int, kv_mib: int, routing: str) -> list[str]:
    """Flags of a server whose instances have ``kv_mib`` together."""
    each = [f"--kv-memory={kv_mib // instances}MiB", f"--instances=mixed={instances}"]
    return ["--model", MODEL, *each, f"--routing={routing}"]


def measured(server: Sequence[str], load: Sequence[str], folder: Path) -> dict[str, Any]:
    """Start a server, load it, end it; what its clients saw, and its memory at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = SystemProcess(
        [*KVELL, "serve", "--port", str(port), *server], folder / "server.log", {}
    )
    try:
        process.wait_for(f"{url}/health", START_SECONDS)
        command = [*KVELL, "bench", "serve", "--base-url", url, *load, "--json", "-"]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        pids = (process.process.pid, *descendants(process.process.pid))
        memory_mib = sum(process_bytes(pid) for pid in pids) // MIB
        figures: dict[str, Any] = json.loads(told.stdout)
        return {**figures, "memory_mib": memory_mib}
    finally:
        process.end()


def row(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a system's rounds, and the range of its output rate."""
    rates = [one["output_tokens_per_second"] for one in runs]
    return {
        "system": name,
        "output_tokens_per_second": median(rates),
        "range": [min(rates), max(rates)],
        "ttft_p50_seconds": median(one["ttft_seconds"]["p50"] for one in runs),
        "tpot_p50_seconds": median(one["tpot_seconds"]["p50"] for one in runs),
        "cached_share": median(one["cached_share"] or 0.0 for one in runs),
        "failed": sum(one["failed"] for one in runs),
        "memory_mib": median(one["memory_mib"] for one in runs),
    }


def main(given: Sequence[str] | None = None) -> None:
    """Print a table, and write it to the bench's result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--workload", default="sharegpt-like")
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--rate", default="inf")
    parser.add_argument("--routing", default="session")
    parser.add_argument("--out", type=Path, default=result_file.path_of("halves"))
    args = parser.parse_args(given)
    load = ["--workload", args.workload, "--limit", str(args.limit), "--rate", args.rate]
    load += ["--think-time", "0.01", "--return-token-ids"]
    systems = {f"mixed={count}": flags(count, args.kv_mib, args.routing) for count in (1, 2)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for name, server in systems.items():
                runs[name].append(measured(server, load, Path(folder)))
    rows = [row(name, each) for name, each in runs.items()]
    one, two = (each["output_tokens_per_second"] for each in rows)
    result_file.write(args.out, {"rows": rows, "ratio": two / one})
    table = Table(*rows[0], title=f"ratio {two / one:.2f}")
    for each in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in each.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
