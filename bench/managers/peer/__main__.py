"""Jobs in, results out, a line of JSON each: ``python -m bench.managers.peer``.

Runs in vLLM's environment.  A result is an object of figures, or ``{"refused": reason}`` where
vLLM refuses the shape or the memory.  Progress is a line ``{"finished": fraction}``.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from bench.managers.peer.job import PeerJob, job_from
from bench.managers.peer.loop import Counts, Loop
from bench.managers.peer.pool import VllmPool
from bench.managers.peer.requests import read_rows
from bench.managers.peer.waste import Held

PROGRESS_SECONDS = 1.0


def replay(job: PeerJob, out: TextIO) -> dict[str, Any]:
    """Run one job."""
    rows = read_rows(Path(job.trace), job.limit)
    pool = VllmPool(job, max(row.num_tokens for row in rows))
    samples: list[Held] = []
    steps = 0
    told = start = time.perf_counter()

    def look(running: Sequence[Any]) -> None:
        nonlocal steps
        steps += 1
        if job.sample_every and steps % job.sample_every == 0:
            samples.append(pool.look(running))

    def progress(finished: int) -> None:
        nonlocal told
        if time.perf_counter() - told > PROGRESS_SECONDS:
            told = time.perf_counter()
            _tell(out, {"finished": finished / len(rows)})

    counts = Loop(pool, rows, job, look).run(progress)
    figures = _figures(counts, samples) | pool.described()
    manager_us = pool.manager_time.nanoseconds / 1e3
    return figures | {
        "manager_us_per_step": manager_us / counts.steps,
        "manager_us_per_request_step": manager_us / counts.scheduled,
        "hash_us_per_request_step": pool.hash_time.nanoseconds / 1e3 / counts.scheduled,
        "kv_memory_bytes": job.memory_bytes,
        "wall_seconds": time.perf_counter() - start,
    }


def _figures(counts: Counts, samples: Sequence[Held]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "requests_finished": counts.finished,
        "requests_refused": 0,
        "steps": counts.steps,
        "batch_mean": counts.request_steps / counts.steps,
        "batch_saturated_mean": counts.saturated_request_steps / max(1, counts.saturated_steps),
        "short_of_memory": counts.short_of_memory_steps / counts.steps,
        "hit_rate": counts.hit_tokens / counts.prompt_tokens,
        "preemptions": counts.preemptions,
        "computed_tokens": counts.computed_tokens,
    }
    names = ("waste", "waste_expired", "waste_unfilled", "waste_padding")
    parts = [sample.parts() for sample in samples if sample.allocated]
    if parts:
        means = (sum(each) / len(parts) for each in zip(*parts, strict=True))
        figures |= dict(zip(names, means, strict=True))
    return figures


def _tell(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def main() -> None:
    """Until the input ends."""
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    for line in sys.stdin:
        try:
            _tell(out, replay(job_from(line), out))
        except ValueError as error:
            _tell(out, {"refused": str(error)})


if __name__ == "__main__":
    main()
