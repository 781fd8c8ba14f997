"""From a command to its first token, after a warm start: weights converted, files in page cache.

``kvell generate``, ``kvell serve``, ``kvell plan`` and ``kvell --help`` are started a few times
each, one after the other, as a user would; with ``--before DIR`` also those of another checkout.
The first two are started with packed weights of an earlier start, with none (a first start, which
writes them), and with ``--no-weight-cache``. Each checkout has a cache directory for this run.
Both wall seconds and the CPU seconds of all the command's processes are measured;
memory is that of these processes at the first token: anonymous and shared memory, and their
proportional share of mapped files.
"""

import argparse
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.side_by_side.processes import descendants
from kvell.vocabulary import MIB

MOST_SECONDS = {
    "first token": 5.0,
    "generate, first token": 2.5,
    "serve, ready": 3.0,
    "plan, end": 1.5,
    "help, end": 0.5,
}
"""The most seconds until a moment that a user should wait."""
PROMPT = "The sky is blue because"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Moment:
    """Time and memory of a command so far.

    :param wall_seconds: since it was started.
    :param cpu_seconds: of its processes together.
    :param own_bytes: anonymous and shared memory of its processes (proportional, PSS).
    :param resident_bytes: likewise, with mapped files.
    """

    wall_seconds: float
    cpu_seconds: float
    own_bytes: int
    resident_bytes: int


def moment(process: subprocess.Popen[bytes], started_seconds: float) -> Moment:
    """Take a reading now; the clock is read first."""
    wall_seconds = time.perf_counter() - started_seconds
    family = [process.pid, *descendants(process.pid)]
    parts = [memory_parts(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in family]
    return Moment(
        wall_seconds,
        sum(cpu_seconds(Path(f"/proc/{pid}/stat").read_text()) for pid in family),
        sum(one["Pss_Anon"] + one["Pss_Shmem"] for one in parts),
        sum(one["Pss"] for one in parts),
    )


def cpu_seconds(stat: str) -> float:
    """CPU seconds of a process and its ended children, from ``/proc/PID/stat``."""
    fields = stat.rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_SECOND


def memory_parts(smaps: str) -> Mapping[str, int]:
    """Bytes by kind, from ``/proc/PID/smaps_rollup``."""
    rows = (line.split() for line in smaps.splitlines()[1:])
    return {name.rstrip(":"): int(kib) << 10 for name, kib, *_ in rows}


@dataclass(frozen=True)
class Kvell:
    """A checkout's command and the cache directory of its starts.

    :param words: the command's words.
    """

    words: tuple[str, ...]
    cache_dir: Path

    def start(
        self, words: Sequence[str], stdout: int = subprocess.PIPE, bufsize: int = -1
    ) -> subprocess.Popen[bytes]:
        """Start a command."""
        environment = os.environ | {"KVELL_CACHE_DIR": str(self.cache_dir)}
        return subprocess.Popen(
            [*self.words, *words],
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            bufsize=bufsize,
            env=environment,
        )

    def forget_weights(self) -> None:
        """Remove the packed weights, so that the next start is a first one."""
        shutil.rmtree(self.cache_dir / "weights", ignore_errors=True)


def program(tree: Path | None, cache_dir: Path) -> Kvell:
    """Return ``kvell`` of a checkout; None is this one."""
    python = sys.executable if tree is None else str(tree / ".venv" / "bin" / "python")
    return Kvell((python, "-m", "kvell.cli.main"), cache_dir)


def ended(kvell: Kvell, words: Sequence[str]) -> dict[str, Moment]:
    """Run a command to its end; its memory is the largest resident size."""
    started_seconds = time.perf_counter()
    process = kvell.start(words, subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall_seconds = time.perf_counter() - started_seconds
    if status:
        raise SystemExit(f"kvell {' '.join(words)} failed")
    process.returncode, size_bytes = 0, used.ru_maxrss << 10
    cpu = used.ru_utime + used.ru_stime
    return {"end": Moment(wall_seconds, cpu, size_bytes, size_bytes)}


def generated(kvell: Kvell, model: str, flags: Sequence[str]) -> dict[str, Moment]:
    """Run ``kvell generate`` until its first output."""
    words = ["generate", "--model", model, "--prompt", PROMPT, *flags]
    started_seconds = time.perf_counter()
    with kvell.start(words, bufsize=0) as process:
        assert process.stdout is not None
        said = process.stdout.read(1)
        at = moment(process, started_seconds) if said else None
        process.kill()
    if at is None:
        raise SystemExit("kvell generate said nothing")
    return {"first token": at}


def served(kvell: Kvell, model: str, flags: Sequence[str]) -> dict[str, Moment]:
    """Run ``kvell serve`` until it is ready, and until the first token of a first request."""
    words = ["serve", "--model", model, "--port", "0", "--json", *flags]
    started_seconds = time.perf_counter()
    with kvell.start(words) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            if not line:
                raise SystemExit("kvell serve did not start")
            ready = moment(process, started_seconds)
            wait_for_words(json.loads(line)["url"])
            first = moment(process, started_seconds)
        finally:
            process.send_signal(signal.SIGTERM)
    return {"ready": ready, "first token": first}


def wait_for_words(url: str) -> None:
    """Request a streamed answer and read until its first text."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    connection.request("GET", "/v1/models")
    name = json.load(connection.getresponse())["data"][0]["id"]
    asked = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    while line := answer.readline():
        body = line.removeprefix(b"data: ").strip()
        if not body.startswith(b"{"):
            continue
        told = json.loads(body)
        if "choices" not in told:
            raise SystemExit(f"kvell serve answered {answer.status}: {told}")
        if told["choices"][0]["text"]:
            connection.close()
            return
    raise SystemExit("kvell serve answered without words")


def figures(moments: Sequence[Moment]) -> dict[str, float]:
    """Best and median over the starts; the most memory."""
    wall = [one.wall_seconds for one in moments]
    cpu = [one.cpu_seconds for one in moments]
    return {
        "wall_best_seconds": min(wall),
        "wall_median_seconds": median(wall),
        "cpu_best_seconds": min(cpu),
        "cpu_median_seconds": median(cpu),
        "own_bytes": max(one.own_bytes for one in moments),
        "resident_bytes": max(one.resident_bytes for one in moments),
    }


def table_of(found: Mapping[str, Mapping[str, float]]) -> Table:
    """A row for each command and moment."""
    table = Table(title="seconds since the start: best (median)")
    for name in ("until", "on the clock", "computed", "own MiB", "with files MiB"):
        table.add_column(name, justify="left" if name == "until" else "right")
    for name, one in found.items():
        table.add_row(
            name,
            f"{one['wall_best_seconds']:.2f} ({one['wall_median_seconds']:.2f})",
            f"{one['cpu_best_seconds']:.2f} ({one['cpu_median_seconds']:.2f})",
            f"{one['own_bytes'] / MIB:.0f}",
            f"{one['resident_bytes'] / MIB:.0f}",
        )
    return table


def one_start(
    kvell: Kvell, model: str, flags: Sequence[str], *, has_cache: bool
) -> Iterator[tuple[str, dict[str, Moment]]]:
    """Start each command once; yield its name and moments."""
    yield "generate", generated(kvell, model, flags)
    yield "serve", served(kvell, model, flags)
    if has_cache:
        plain = [*flags, "--no-weight-cache"]
        yield "generate without cache", generated(kvell, model, plain)
        yield "serve without cache", served(kvell, model, plain)
        kvell.forget_weights()
        yield "first generate", generated(kvell, model, flags)
        kvell.forget_weights()
        yield "first serve", served(kvell, model, flags)
        prepare(kvell, model, flags)
    yield "plan", ended(kvell, ["plan", "--model", model, *flags])
    yield "help", ended(kvell, ["--help"])


def prepare(kvell: Kvell, model: str, flags: Sequence[str]) -> None:
    """Convert and pack weights, and bring files into page cache."""
    ended(kvell, ["generate", "--model", model, "--prompt", PROMPT, "--max-tokens", "1", *flags])


def measured(options: argparse.Namespace, folder: Path) -> dict[str, list[Moment]]:
    """Return the moments of all starts by their names, the checkouts in turn."""
    flags = ["--kv-memory", options.kv_memory]
    trees = {"": program(None, folder / "this")}
    if options.before is not None:
        trees["before: "] = program(options.before, folder / "before")
    for kvell in trees.values():
        prepare(kvell, options.model, flags)
    seen: dict[str, list[Moment]] = {}
    for _ in range(options.starts):
        for tree, kvell in trees.items():
            for command, moments in one_start(kvell, options.model, flags, has_cache=not tree):
                for name, at in moments.items():
                    seen.setdefault(f"{tree}{command}, {name}", []).append(at)
    return seen


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--before", type=Path, help="another checkout, with its .venv")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        seen = measured(options, Path(folder))
    found = {name: figures(moments) for name, moments in seen.items()}
    about, console = machine.describe(), Console(width=110)
    console.print(about)
    console.print(table_of(found))
    for name, one in found.items():
        for end, most_seconds in MOST_SECONDS.items():
            if name.endswith(end) and "before" not in name:
                holds = one["wall_median_seconds"] <= most_seconds
                console.print(f"{name} within {most_seconds:g} s: {'yes' if holds else 'no'}")
    if options.json:
        starts = {name: [asdict(one) for one in moments] for name, moments in seen.items()}
        report = {"machine": about, "model": options.model, "figures": found, "starts": starts}
        result_file.write(options.json, report)


if __name__ == "__main__":
    main()
