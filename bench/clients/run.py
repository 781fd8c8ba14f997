"""Whether clients that others wrote work unchanged: ``python -m bench.clients.run``.

It starts ``kvell serve`` with SmolLM2 and runs each client's checks in an environment of its own.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.clients.environments import CLIENTS, command_of, versions_of
from bench.side_by_side.systems import kvell_server
from kvell.cli.terminal.environment import process_cache_dir
from kvell.errors import KvellError
from kvell.models.sources.source import resolve_model

MODEL = "smollm2"
RESULTS = result_file.path_of("clients")
TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Told:
    """What a client's checks came to.

    :param failed: why, by check.
    """

    versions: list[str]
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def told_by(name: str, directory: Path, base_url: str, model_directory: Path) -> Told:
    """Run a client's checks."""
    client = CLIENTS[name]
    command = [*command_of(client, directory), base_url, MODEL, str(model_directory)]
    told = Told(versions_of(client, directory))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
        output, problem = done.stdout, done.stderr.strip().splitlines()[-1:]
        is_over = done.returncode == 0
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode()
        is_over, problem = False, [f"longer than {TIMEOUT_SECONDS:.0f} s"]
    for line in output.splitlines():
        if line.startswith('{"check"'):
            one = json.loads(line)
            if one["ok"]:
                told.passed.append(one["check"])
            else:
                told.failed[one["check"]] = one["why"]
    if not is_over:
        told.failed["all of it"] = " ".join(problem)
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the clients that are named; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", type=Path, required=True, help="folder of their environments")
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    found = {}
    model_directory = resolve_model(MODEL, process_cache_dir())
    with tempfile.TemporaryDirectory() as directory:
        system = kvell_server(MODEL, Path(directory, "server.log"), ["--kv-memory", "512MiB"])
        try:
            for name in given.clients:
                told = told_by(name, given.env / name, f"{system.base_url}/v1", model_directory)
                found[name] = asdict(told)
                _show(name, told)
        finally:
            system.process.end()
    before = json.loads(given.json.read_text())["clients"] if given.json.exists() else {}
    result_file.write(given.json, {"clients": before | found})
    return int(any(one["failed"] for one in found.values()))


def _show(name: str, told: Told) -> None:
    total = len(told.passed) + len(told.failed)
    table = Table("check", "why", title=f"{name}: {len(told.passed)} of {total}")
    for check, why in told.failed.items():
        table.add_row(check, why)
    Console().print(table if told.failed else f"{name}: all {total}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvellError as error:
        sys.exit(str(error))
