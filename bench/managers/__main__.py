"""Memory managers side by side, on suites of shapes, traces and memory sizes.

``python -m bench.managers matrix --traces DIR``.  Every cell is a ``kvell replay``, or a replay
over vLLM's own manager (``--vllm-env``).  The outcome of each cell is kept in ``.cache/managers``
under the sources that made it, so an interrupted run continues.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import result_file
from bench.managers.cells import (
    AMPLE,
    FULL,
    FULL_POOL,
    POLICIES,
    SUITES,
    VLLM,
    Case,
    Suite,
    endless_hit_rate,
    kinds,
    memory_flag,
    rows_of,
    trace_file,
)
from bench.managers.theirs import Peer, peer_job
from bench.managers.verdicts import Comparison, Verdict, is_refused, refusals, verdicts
from bench.replay.command import replayed
from bench.replay.shapes import read_shape
from bench.result_file import REPOSITORY
from kvell.byte_sizes import parse_bytes
from kvell.errors import ChangeSomething

CACHE = REPOSITORY / ".cache" / "managers"
SOURCES = ("src/kvell/**/*.py", "csrc/memory/*", "bench/configs/*.json", "bench/managers/**/*.py")
"""Files on which an outcome depends."""
US = "manager_us_per_request_step"
FIGURES = {
    "steps": "{:,}",
    "batch_mean": "{:.2f}",
    "hit_rate": "{:.4f}",
    "waste": "{:.3%}",
    "short_of_memory": "{:.0%}",
    "preemptions": "{:,}",
    US: "{:.2f}",
}
"""Figures of the table, and how they are printed."""
KEPT = (*FIGURES, "requests_finished", "requests_refused", "stranded", "kv_memory_bytes")
SAMPLE_EVERY = 256
"""Steps between two samples of vLLM's pages, which are slow to scan."""


class Runner:
    """Runs cells, and keeps their outcomes.

    :param limit: requests of each trace at most; None for as many as the suite has.
    :param environment: that of vLLM; its cells are left out without one.
    """

    def __init__(self, traces: Path, limit: int | None, environment: Path | None) -> None:
        self._traces, self._limit, self._environment = traces.resolve(), limit, environment
        self._sources = fingerprint(REPOSITORY)
        self._open = ExitStack()
        self._peer: Peer | None = None

    def outcome(self, case: Case, policy: str, turn: int = 0) -> dict[str, Any] | None:
        """Return the outcome of a cell, from the cache where it is there; None where it cannot run.

        :param turn: number of the repetition.
        """
        if policy in VLLM and self._environment is None:
            return None
        name = f"{case.name}.{policy}.{self._limit}.{turn}"
        path = CACHE / self._sources / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
        if not path.exists():
            outcome = self._vllm(case, policy) if policy in VLLM else self._kvell(case, policy)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(outcome))
            part.replace(path)
        known: dict[str, Any] = json.loads(path.read_text())
        return known

    def _memory(self, case: Case) -> str:
        if case.memory != FULL:
            return memory_flag(case, self._traces)
        ample = self.outcome(replace(case, memory=AMPLE), "kvell") or {}
        return f"{int(FULL_POOL * ample['needed_bytes_mean'])}B"

    def _requests(self, case: Case) -> int:
        return min(case.requests, self._limit or case.requests)

    def _kvell(self, case: Case, policy: str) -> dict[str, Any]:
        path = trace_file(self._traces, case.trace)
        source = ("--trace", path) if path else ("--trace", case.trace, "--seed", case.seed)
        with tempfile.TemporaryDirectory() as directory:
            requests = Path(directory, "requests.jsonl")
            words = (*source, "--limit", self._requests(case), "--model", case.shape)
            memory = ("--kv-memory", self._memory(case))
            out = ("--requests-out", requests)
            report = replayed(*words, *memory, *case.flags, *POLICIES[policy], *out)
            if is_refused(report):
                return report
            decisions = hashlib.sha256(requests.read_bytes()).hexdigest()[:16]
        needed = sum(group["needed_bytes_mean"] for group in report["groups"])
        figures = {name: report[name] for name in KEPT}
        return figures | {"needed_bytes_mean": needed, "decisions": decisions}

    def _vllm(self, case: Case, policy: str) -> dict[str, Any]:
        if self._peer is None and self._environment is not None:
            self._peer = self._open.enter_context(Peer(self._environment))
        path = trace_file(self._traces, case.trace)
        if self._peer is None or path is None:
            raise ValueError(f"vLLM's manager replays recorded traces only: {case.trace}")
        job = peer_job(
            read_shape(case.shape),
            path,
            self._requests(case),
            parse_bytes(self._memory(case), "memory"),
            retention_tokens=VLLM[policy],
            sample_every=SAMPLE_EVERY,
        )
        figures: dict[str, Any] = self._peer.run(job)
        return {name: value for name, value in figures.items() if name in (*KEPT, "refused")}

    def close(self) -> None:
        """End the process of vLLM's manager."""
        self._open.close()


def fingerprint(root: Path) -> str:
    """Return a digest that changes with the name or the content of any of :data:`SOURCES`."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def run(runner: Runner, suite: Suite, rounds: int) -> Iterator[tuple[Case, str, dict[str, Any]]]:
    """Yield the outcome of every cell; times are the least of the rounds."""
    for case, policy in track(list(suite.cells()), "cells", console=Console(stderr=True)):
        turns = [runner.outcome(case, policy, turn) for turn in range(rounds)]
        outcomes = [outcome for outcome in turns if outcome is not None]
        if outcomes:
            yield case, policy, min(outcomes, key=lambda outcome: outcome.get(US, 0.0))


def compared(
    outcomes: Sequence[tuple[Case, str, dict[str, Any]]], traces: Path
) -> tuple[list[Comparison], dict[str, float]]:
    """Return the comparisons, and the hit rate of an endless cache for each of them."""
    by_case: dict[Case, dict[str, dict[str, Any]]] = {}
    for case, policy, outcome in outcomes:
        by_case.setdefault(case, {})[policy] = outcome
    comparisons = [
        Comparison(case.name, kinds(read_shape(case.shape)), found)
        for case, found in by_case.items()
    ]
    return comparisons, {case.name: endless_hit_rate(rows_of(case, traces)) for case in by_case}


def tables(
    comparisons: Sequence[Comparison], endless: Mapping[str, float], told: Sequence[Verdict]
) -> Iterator[Table]:
    """Yield the table of all cells, and the one of the verdicts."""
    table = Table("case", "policy", *FIGURES, "of endless")
    for one in comparisons:
        for policy, outcome in one.outcomes.items():
            if is_refused(outcome):
                table.add_row(one.name, policy, "refused")
                continue
            values = (
                form.format(outcome[name]) if name in outcome else "–"
                for name, form in FIGURES.items()
            )
            rate = endless[one.name]
            part = f"{outcome['hit_rate'] / rate:.3f}" if rate else "–"
            table.add_row(one.name, policy, *values, part)
    yield table
    if told:
        judged = Table("clause", "compared", "holds in", "required", "misses")
        for verdict in told:
            misses = "; ".join(f"{name}: {why}" for name, why in verdict.missed.items())
            shares = (f"{verdict.share:.1%}", f"{verdict.required:.0%}")
            judged.add_row(verdict.clause, str(verdict.compared), *shares, misses[:400])
        yield judged


def chosen(args: argparse.Namespace) -> Suite:
    """Return the part of the suite that the flags choose."""
    suite = SUITES[args.suite]
    cases = tuple(
        case
        for case in suite.cases
        if (not args.shape or case.shape in args.shape)
        and (not args.trace or case.trace in args.trace)
        and (not args.memory or case.memory in args.memory)
    )
    return Suite(cases, tuple(args.policy or suite.policies))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--vllm-env", type=Path, help="what bench.managers.environment made")
    parser.add_argument("--shape", nargs="+", help="only these shapes")
    parser.add_argument("--trace", nargs="+", help="only these traces")
    parser.add_argument("--memory", nargs="+", help="only these sizes, like 8x or 24GiB")
    parser.add_argument("--policy", nargs="+", choices=(*POLICIES, *VLLM), help="only these")
    parser.add_argument("--requests", type=int, help="of each trace at most, for a quick look")
    parser.add_argument("--rounds", type=int, default=1, help="the least time of each counts")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Run the cells that are missing; print tables, and write the figures if asked."""
    args = arguments(given)
    runner = Runner(args.traces, args.requests, args.vllm_env)
    try:
        outcomes = list(run(runner, chosen(args), args.rounds))
    except ChangeSomething as error:
        raise SystemExit(str(error)) from error
    finally:
        runner.close()
    comparisons, endless = compared(outcomes, args.traces)
    told = verdicts(comparisons) if args.suite == "matrix" else []
    console = Console(width=160)
    for table in tables(comparisons, endless, told):
        console.print(table)
    console.print("\n".join(refusals(comparisons)))
    if args.json:
        figures = {
            "verdicts": [verdict.as_json() for verdict in told],
            "cells": {one.name: dict(one.outcomes) for one in comparisons},
            "endless_hit_rates": endless,
        }
        has_times = args.suite == "peers"
        result_file.write(args.json, figures, processor=None if has_times else result_file.VIRTUAL)


if __name__ == "__main__":
    main()
