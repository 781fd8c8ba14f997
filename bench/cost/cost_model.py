"""Error of the cost model on held-out prompts, exec(x, y), and steps, on three shapes.

Operators are fitted as ``kvell calibrate`` does.  Then prompts of held-out lengths and cached
ratios go through the whole engine, and their measured seconds to the first token are compared with
the predictions, and with the arch-level baseline of MemServe §5.3.2, which is fitted directly to
seconds to the first token over a grid of (x, y).
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench import machine, result_file
from bench.cost.arch_level import PrefillPoint, fit_arch_level
from bench.cost.shapes import NAMES, model_path
from bench.cpu_clock import CpuClock
from kvell.calibration.rig import Rig
from kvell.calibration.run import QUANTILE, Outcome, calibrate
from kvell.calibration.subject import Subject, load_subject
from kvell.clock import Clock, MonotonicClock
from kvell.cost.model import prefill_seconds
from kvell.engine.setup.options import EngineOptions
from kvell.models.sources.progress import Progress
from kvell.vocabulary import MIB

BOUND = 0.10
Prompt = tuple[int, float]
"""x, the prompt's tokens, and y, the cached part of them."""

GRID = tuple(product((64, 128, 256, 512, 1024, 2048, 3000), (0.0, 0.25, 0.5, 0.75)))
HELD_OUT = tuple(product((96, 192, 384, 768, 1536, 2500), (0.0, 0.1, 0.4, 0.6, 0.9)))
QUICK_GRID = tuple(product((64, 256, 1024), (0.0, 0.5, 0.75)))
QUICK_HELD_OUT = tuple(product((96, 384, 768), (0.0, 0.4, 0.9)))


def first_tokens(
    rig: Rig, prompts: Sequence[Prompt], rounds: int, progress: Progress
) -> list[PrefillPoint]:
    """Seconds to the first token of each prompt, in turns; the first round does not count."""
    found: list[list[float]] = [[] for _ in prompts]
    rig.clear()
    for turn in range(rounds + 1):
        for index, (length, ratio) in enumerate(prompts):
            progress("prompts, x and y", (turn + index / len(prompts)) / (rounds + 1))
            cached = int(length * ratio)
            seconds = rig.first_token_seconds(cached, length - cached)
            if turn:
                found[index].append(seconds)
    return [
        PrefillPoint(length, ratio, float(np.quantile(seconds, QUANTILE)))
        for (length, ratio), seconds in zip(prompts, found, strict=True)
    ]


def measured(
    subject: Subject, clock: Clock, progress: Progress, *, quick: bool, rounds: int
) -> dict[str, Any]:
    """All figures of one shape."""
    outcome = calibrate(subject, clock, progress, quick=quick)
    rig = Rig(subject.engine, subject.model, clock, seed=1)
    grid, judges = (QUICK_GRID, QUICK_HELD_OUT) if quick else (GRID, HELD_OUT)
    points = first_tokens(rig, [*grid, *judges], rounds, progress)
    known, unseen = points[: len(grid)], points[len(grid) :]
    arch, made = fit_arch_level(known), outcome.calibration
    operators = [prefill_seconds(made, p.prompt_tokens, p.cached_ratio) for p in unseen]
    directly = [arch.prefill_seconds(p.prompt_tokens, p.cached_ratio) for p in unseen]
    seconds = [point.seconds for point in unseen]
    return {
        "exec_error": _error(operators, seconds),
        "exec_error_arch_level": _error(directly, seconds),
        "decode_step_error": made.held_out.decode_error,
        "prefill_step_error": made.held_out.prefill_error,
        "mixed_step_error": made.held_out.mixed_error,
        "learned_step_error": _learned_error(outcome),
        "repeat_spread": made.noise,
        "constant_share": made.operators.constants.share,
        "tile_rows": made.operators.layers.tile_rows,
        "held_out_steps": made.held_out.steps,
        "held_out_prompts": [
            asdict(point) | {"predicted_seconds": ours, "arch_level_seconds": theirs}
            for point, ours, theirs in zip(unseen, operators, directly, strict=True)
        ],
    }


def _learned_error(outcome: Outcome) -> float:
    steps = [repeats.median() for repeats in outcome.learned]
    predicted = [outcome.calibration.step_seconds(step.work) for step in steps]
    return _error(predicted, [step.seconds for step in steps])


def _error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return median(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))


def show(shapes: dict[str, dict[str, Any]]) -> None:
    """A table of median errors."""
    from kvell.cli.terminal.figures import wide_console
    from kvell.cli.terminal.tables import made_table

    columns = {
        "exec(x, y)": "exec_error",
        "arch-level": "exec_error_arch_level",
        "decode step": "decode_step_error",
        "prefill step": "prefill_step_error",
        "mixed step": "mixed_step_error",
        "repeats differ by": "repeat_spread",
    }
    rows = [
        (name, *(f"{found[key]:.1%}" for key in columns.values())) for name, found in shapes.items()
    ]
    wide_console().print(made_table("median errors, held out", ("shape", *columns), rows))


def missed(shapes: dict[str, dict[str, Any]]) -> list[str]:
    """Bounds that were not kept, as sentences."""
    return [
        f"{name}: {key} is {found[key]:.1%}, above {BOUND:.0%}"
        for name, found in shapes.items()
        for key in ("exec_error", "decode_step_error")
        if found[key] > BOUND
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kv-memory-mib", type=int, default=1024)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, one thread")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvell")
    parser.add_argument("--work-dir", type=Path, default=Path("build") / "bench-models")
    parser.add_argument("--json", type=Path, default=result_file.path_of("cost_model"))
    options = parser.parse_args(arguments)
    from kvell.cli.terminal.progress import progress_bar

    clock: Clock = CpuClock() if options.cpu_time else MonotonicClock()
    if options.cpu_time:
        torch.set_num_threads(1)
    engine = EngineOptions(
        kv_memory_bytes=options.kv_memory_mib * MIB,
        max_model_len=None,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
    )
    shapes: dict[str, dict[str, Any]] = {}
    for name in options.shapes:
        with progress_bar(name) as progress:
            path = model_path(name, options.cache_dir, options.work_dir, progress)
            subject = load_subject(str(path), "auto", "cpu", engine, options.cache_dir, progress)
            rounds = 2 if options.quick else options.rounds
            shapes[name] = measured(subject, clock, progress, quick=options.quick, rounds=rounds)
        show(shapes)
        report = {
            "machine": machine.describe(),
            "clock": "cpu" if options.cpu_time else "wall",
            "quick": options.quick,
            "shapes": shapes,
            "missed": missed(shapes),
        }
        result_file.write(options.json, report)
    print("\n".join(missed(shapes)) or "all bounds kept")


if __name__ == "__main__":
    main()
