"""A step that swaps: copies before its pass, under it, and what the replay charges for both.

See README.md beside this file.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench import machine, result_file
from bench.engine.forward import Shape
from kvell.clock import Clock, MonotonicClock
from kvell.engine.assembly import load_model
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import NewPages, StepPlan, TokenWork
from kvell.engine.running.copies_under_pass import Copier
from kvell.engine.running.page_mover import PageMover
from kvell.engine.running.runner import ModelRunner
from kvell.memory import Layout, SlotTable, plan_layout
from kvell.models.paged_model import PagedModel
from kvell.models.sources.progress import quiet
from kvell.models.sources.source import resolve_model
from kvell.simulator.replay.host_link import WithHostLink
from kvell.vocabulary import MIB, RequestId, StepNumber

STEPS = ("8x1x512", "32x1x512", "1x256x2048")
PAGES = (16, 32, 64, 128)
"""So many pages go out in a step, and as many come in."""
FIT = "8x1x512"
"""The step from which the replay learns how copies slow a pass; the others judge it."""
NONE, BEFORE, UNDER, ALONE = SIDES = ("no copies", "before", "under", "copies alone")
WITHIN = 0.1


@dataclass(frozen=True)
class Seen:
    """Seconds of one side: of the fastest round, of the middle one, of the slowest."""

    best: float
    middle: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Seen":
        """Of all rounds."""
        return cls(min(seconds), median(seconds), max(seconds))


@dataclass(frozen=True)
class Known:
    """A machine that takes what the step without copies took."""

    seconds: float
    request_seconds: float = 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        """See :class:`StepTimer`."""
        return self.seconds


class Rig:
    """One model with two runners over its pool, which differ in when they copy."""

    def __init__(self, model: PagedModel, pool_mib: int, pages: int, clock: Clock) -> None:
        self.layout = plan_layout(model.description.layers, pool_mib * MIB)
        (self._group,) = self.layout.groups
        self._clock, self._vocab = clock, model.description.vocab_size
        pool = torch.zeros(self.layout.pool_bytes, dtype=torch.uint8)
        buffer = torch.zeros(2 * pages * self._group.page_stride_bytes, dtype=torch.uint8)
        model.attach(self.layout, pool)
        slots = SlotTable(self.layout.num_large_pages)
        self._mover = PageMover(self.layout, slots, pool, buffer)
        self._under, self._before = (
            ModelRunner(model, self.layout, slots, pool, buffer=buffer) for _ in range(2)
        )
        # As on a GPU: nothing goes under the pass.
        self._before.copier = Copier(self._mover, self.layout.groups, [""], on_host=False)

    def plan(self, shape: Shape, pages: int) -> StepPlan:
        """A step whose requests get back their first pages; half of what goes out is theirs now."""
        each = -(-shape.context_tokens // self._group.page_tokens)
        if pages > each * shape.requests or each * shape.requests + pages > self._num_pages:
            raise ValueError(f"{shape}: its requests have no {pages} pages, or the pool no room")
        draw = np.random.default_rng(pages)
        own = draw.permutation(self._num_pages).astype(np.int32)
        tables, others = own[: each * shape.requests], own[each * shape.requests :]
        back, half = tables[:pages], pages // 2
        out = np.concatenate([back[:half], others[: pages - half]])
        held = draw.permutation(2 * pages).astype(np.int32)
        handles, positions = np.divmod(np.arange(len(tables)), each)
        new = np.stack([handles, 0 * handles, positions, tables], 1).astype(np.int32)
        return StepPlan(
            StepNumber(1),
            offloads=_rows(out, held[:pages]),
            fetches=_rows(held[pages:], back),
            new_pages=new,
            work=tuple(self._work(shape, number, draw) for number in range(shape.requests)),
        )

    def rounds(self, plan: StepPlan, count: int) -> dict[str, Seen]:
        """Every side in turn, ``count`` times, after one round that warms up."""
        bare = replace(plan, offloads=plan.offloads[:0], fetches=plan.fetches[:0])
        sides: dict[str, Callable[[], object]] = {
            NONE: lambda: self._under.run(bare),
            BEFORE: lambda: self._before.run(plan),
            UNDER: lambda: self._under.run(plan),
            ALONE: lambda: self._move(plan),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(count + 1):
            for side, run in sides.items():
                began_seconds = self._clock.now_seconds()
                run()
                if number:
                    seconds[side].append(self._clock.now_seconds() - began_seconds)
        return {side: Seen.of(some) for side, some in seconds.items()}

    def _move(self, plan: StepPlan) -> None:
        self._mover.offload(plan.offloads)
        self._mover.fetch(plan.fetches)

    @property
    def _num_pages(self) -> int:
        return self.layout.pool_bytes // self._group.page_stride_bytes

    def _work(self, shape: Shape, number: int, draw: np.random.Generator) -> TokenWork:
        ids = draw.integers(3, self._vocab, shape.new_tokens).astype(np.int32)
        greedy, start = SamplingParams(temperature=0), shape.context_tokens - shape.new_tokens
        return TokenWork(RequestId(str(number)), number, start, shape.new_tokens, ids, greedy, 0)


def _rows(first: NewPages, second: NewPages) -> NewPages:
    return np.stack([np.zeros(len(first)), first, second], 1).astype(np.int32)


@dataclass(frozen=True)
class Row:
    """One step with one number of pages."""

    step: str
    pages: int
    moved_mib: float
    seen: Mapping[str, Seen]
    replayed: Mapping[str, float]

    def error(self, side: str) -> float:
        """How far the replay is from the fastest round: 0.1 is 10 % too long."""
        return self.replayed[side] / self.seen[side].best - 1


def moved_bytes(plan: StepPlan, layout: Layout) -> int:
    """Out and in."""
    return (len(plan.offloads) + len(plan.fetches)) * layout.groups[0].page_stride_bytes


def link_of(
    plan: StepPlan, seen: Mapping[str, Seen], layout: Layout, *, on_host: bool, slows: float = 1.0
) -> WithHostLink:
    """The replay's link at the rate of the copies alone."""
    rate = moved_bytes(plan, layout) / seen[ALONE].best
    return WithHostLink(Known(seen[NONE].best), layout, rate, on_host=on_host, slows=slows)


def fitted(measured: Sequence[tuple[StepPlan, Mapping[str, Seen]]], layout: Layout) -> float:
    """The ``slows`` that is nearest to all of them, of hundredths from 0 to 1."""

    def miss(slows: float) -> float:
        told = (
            (link_of(plan, seen, layout, on_host=True, slows=slows).step_seconds(plan), seen)
            for plan, seen in measured
        )
        return sum((seconds / seen[UNDER].best - 1) ** 2 for seconds, seen in told)

    return min((number / 100 for number in range(101)), key=miss)


def line(row: Row) -> str:
    """One row as text: fastest (median) milliseconds."""
    sides = " | ".join(
        f"{side} {1e3 * one.best:.1f} ({1e3 * one.middle:.1f} to {1e3 * one.worst:.1f})"
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
    rig = Rig(model, options.pool_mib, max(options.pages), MonotonicClock())
    plans = {
        (step, pages): rig.plan(Shape.named(step), pages)
        for step in options.steps
        for pages in options.pages
    }
    seen = {which: rig.rounds(plan, options.rounds) for which, plan in plans.items()}
    learned = [which for which in plans if which[0] == FIT] or list(plans)
    slows = fitted([(plans[which], seen[which]) for which in learned], rig.layout)
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
    worst = max(abs(row.error(side)) for row in rows for side in (BEFORE, UNDER))
    print(f"{'holds' if worst <= WITHIN else 'FAILS'}: the replay is within {100 * worst:.0f} %")
    if options.json:
        told: dict[str, Any] = {"model": options.model, "slows": slows, "read_gbs": read_gbs}
        result_file.write(options.json, told | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
