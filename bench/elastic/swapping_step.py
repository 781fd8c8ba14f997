"""A step that swaps: copies before its pass, under it, and what the replay charges for both.

See README.md beside this file.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import machine, result_file
from bench.engine.forward import Shape
from kvell.calibration.host_copies import (
    BEFORE,
    UNDER,
    CopyRig,
    SideSeconds,
    fit_slowdown,
    link_of,
    moved_bytes,
)
from kvell.clock import MonotonicClock
from kvell.engine.assembly import load_model
from kvell.engine.requests.plan import StepPlan
from kvell.engine.running.copies.copies_under_pass import copies_beside_passes
from kvell.models.sources.progress import quiet
from kvell.models.sources.source import resolve_model
from kvell.vocabulary import MIB

STEPS = ("8x1x512", "32x1x512", "1x256x2048")
PAGES = (16, 32, 64, 128)
"""So many pages go out in a step, and as many come in."""
FIT = "8x1x512"
"""The step from which the replay learns how copies slow a pass; the others judge it."""
WITHIN = 0.1


@dataclass(frozen=True)
class Row:
    """One step with one number of pages."""

    step: str
    pages: int
    moved_mib: float
    seen: Mapping[str, SideSeconds]
    replayed: Mapping[str, float]

    def error(self, side: str) -> float:
        """How far the replay is from the middle round: 0.1 is 10 % too long."""
        return self.replayed[side] / self.seen[side].middle - 1

    def chosen(self, *, has_spare: bool) -> float:
        """How much longer a step is as the engine copies than with all before: 0.1 is 10 %."""
        side = UNDER if has_spare else BEFORE
        return self.seen[side].middle / self.seen[BEFORE].middle - 1


def plan_of(rig: CopyRig, shape: Shape, pages: int) -> StepPlan:
    """The plan of a step of this shape that moves so many pages each way."""
    return rig.plan(shape.requests, shape.new_tokens, shape.context_tokens, pages)


def line(row: Row) -> str:
    """One row as text: median (fastest to slowest) milliseconds."""
    sides = " | ".join(
        f"{side} {1e3 * one.middle:.1f} ({1e3 * one.best:.1f} to {1e3 * one.worst:.1f})"
        for side, one in row.seen.items()
    )
    told = ", ".join(
        f"{side} {1e3 * row.replayed[side]:.1f} ({100 * row.error(side):+.0f} %)"
        for side in (BEFORE, UNDER)
    )
    return (
        f"{row.step}, {row.pages} pages each way, {row.moved_mib:.0f} MiB: {sides}; replay: {told}"
    )


def main() -> None:
    """Measure all steps, then fit, then judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), help="requests x new x context")
    parser.add_argument("--pages", type=int, nargs="+", default=list(PAGES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pool-mib", type=int, default=1024)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache/kvell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    model = load_model(resolve_model(options.model, options.cache_dir), "bfloat16", "cpu", quiet)
    rig = CopyRig(model, options.pool_mib * MIB, max(options.pages), MonotonicClock())
    plans = {
        (step, pages): plan_of(rig, Shape.named(step), pages)
        for step in options.steps
        for pages in options.pages
    }
    seen = dict(zip(plans, rig.rounds(list(plans.values()), options.rounds), strict=True))
    learned = [which for which in plans if which[0] == FIT] or list(plans)
    slows = fit_slowdown([(plans[which], seen[which]) for which in learned], rig.layout)
    rows = []
    for which, plan in plans.items():
        links = {
            BEFORE: link_of(plan, seen[which], rig.layout, on_host=False),
            UNDER: link_of(plan, seen[which], rig.layout, on_host=True, slows=slows),
        }
        replayed = {side: link.step_seconds(plan) for side, link in links.items()}
        moved_mib = moved_bytes(plan, rig.layout) / MIB
        rows.append(Row(*which, moved_mib, seen[which], replayed))
        print(line(rows[-1]), flush=True)
    read_gbs = machine.read_bandwidth_gb_per_second()
    print(f"slows {slows:.2f}, learned from {FIT}; reads at {read_gbs:.0f} GB/s")
    has_spare = copies_beside_passes(None)
    chosen = [row.chosen(has_spare=has_spare) for row in rows]
    print(
        f"by default pages are copied {UNDER if has_spare else BEFORE} the pass here: "
        f"{100 * min(chosen):+.0f} to {100 * max(chosen):+.0f} % over copies before it"
    )
    worst = max(abs(row.error(side)) for row in rows for side in (BEFORE, UNDER))
    print(f"{'holds' if worst <= WITHIN else 'FAILS'}: the replay is within {100 * worst:.0f} %")
    if options.json:
        told: dict[str, Any] = {
            "model": options.model,
            "slows": slows,
            "read_gbs": read_gbs,
            "copies_under_pass": has_spare,
        }
        result_file.write(options.json, told | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
