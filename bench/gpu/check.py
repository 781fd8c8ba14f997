"""Check and time everything of Kvell that runs on a GPU; see README.md."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path

from bench.gpu.installing import installed
from bench.gpu.report import Row, failures, last_line, line, read_of, summary
from bench.gpu.stages import Stage, Starter, forking
from bench.result_file import RowFile

STAGES = (
    Stage("machine", "bench.gpu.machine:rows", 40),
    Stage("warm", "bench.gpu.speed:warm", 60, most_parts=11),
    Stage("exact", "bench.gpu.engine:exact", 60, most_parts=10),
    Stage("attention", "bench.gpu.speed:timings", 100),
    Stage("engine", "bench.gpu.engine:throughput", 45),
    Stage("chunks", "bench.gpu.chunks:rows", 35),
    Stage("contract", "bench.gpu.contract:rows", 125, most_parts=16),
)
"""In this order; what is known to hold comes last, in case that time runs out."""
PROBE = Stage("probe", "bench.gpu.check:probe", 60)
SECONDS = 430.0


def probe(pretends: bool, part: int, of: int) -> Iterator[Row]:
    """Yield the GPU's name if a process can compute there; an empty one where a CPU pretends."""
    import torch  # here, so that the command itself needs no torch

    if pretends:
        yield {"gpu": ""}
    elif torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()
        yield {"gpu": torch.cuda.get_device_name()}


def chosen(names: str | None) -> list[Stage]:
    """Return the stages of these names, in their order.

    :raises SystemExit: if there is no such stage.
    """
    if names is None:
        return list(STAGES)
    wanted = {name.strip() for name in names.split(",")}
    unknown = wanted - {stage.name for stage in STAGES}
    if unknown:
        known = ", ".join(stage.name for stage in STAGES)
        raise SystemExit(f"no such stages: {', '.join(sorted(unknown))}; choose of {known}")
    return [stage for stage in STAGES if stage.name in wanted]


def starter_for(pretends: bool, workers: int, stages: Sequence[Stage]) -> tuple[Starter, str]:
    """Return what starts the stages' processes, and the name of the GPU that they can use.

    Importing once and forking saves half a minute.  Should an import ever touch the driver, then no
    fork can use the GPU: so one tries, and if it fails every process imports for itself.

    :raises SystemExit: with 2 if there is no GPU.
    """
    modules = [stage.run.partition(":")[0] for stage in stages]
    said = ""
    for context in (forking(modules), get_context("spawn")):
        starter = Starter(context, pretends, workers)
        rows = list(starter.run([PROBE], PROBE.seconds))
        names = [row["gpu"] for row in rows if "gpu" in row]
        if names:
            print(f"processes start by {context.get_start_method()}", flush=True)
            return starter, names[0]
        said = " ".join(last_line(row["said"]) for row in failures(rows))
    print(f"there is no GPU that torch can use: nothing was checked. {said}")
    raise SystemExit(2)


def taken(rows: Iterator[Row], out: Path | None, processor: str | None) -> list[Row]:
    """Print and keep rows as they come, and the table of those so far beside them."""
    kept: list[Row] = []
    file = RowFile(out, processor=processor) if out else None
    for row in rows:
        kept.append(row)
        print(line(row, read_of(kept)), flush=True)
        if file and out:
            file.add(row)
            out.with_suffix(".txt").write_text(summary(kept), encoding="utf-8")
    return kept


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    made.add_argument("--wheels", type=Path, help="folder that scripts/device_wheels filled")
    made.add_argument("--out", type=Path, help="file of rows, as JSON lines; its table is .txt")
    names = ",".join(stage.name for stage in STAGES)
    made.add_argument("--only", metavar="STAGES", help=f"of {names}")
    made.add_argument("--seconds", type=float, default=SECONDS, help="for all stages together")
    made.add_argument("--pretend", action="store_true", help="tiny sizes on the CPU, no GPU")
    made.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parser().parse_args(given)
    stages, begin = chosen(options.only), time.monotonic()
    if options.pretend:  # read where Triton is first imported: by the stages' processes
        os.environ["TRITON_INTERPRET"] = "1"
    with installed(options.wheels):
        starter, gpu = starter_for(options.pretend, options.workers, stages)
        left = options.seconds - (time.monotonic() - begin)
        rows = taken(starter.run(stages, left), options.out, gpu or None)
    print(f"\n{summary(rows)}{time.monotonic() - begin:.0f} s")
    return 1 if failures(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
