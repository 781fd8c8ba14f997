"""The cost of copies between pool and CPU buffer, and how much they slow a concurrent pass.

Two runners over one pool time a step whose copies are made before its pass or during it.
Keys and values are arbitrary bytes of the pool: neither a pass nor a copy depends on them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from kvell.clock import Clock
from kvell.cost.calibration import HostCopies
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import NewPages, StepPlan, TokenWork
from kvell.engine.running.copies.page_mover import PageMover
from kvell.engine.running.runner import ModelRunner
from kvell.memory import Layout, plan_layout, pool_bytes_for
from kvell.models.paged_model import PagedModel
from kvell.pages.stages import BY_LAYER
from kvell.simulator.replay.host_link import WithHostLink
from kvell.vocabulary import RequestId, StepNumber

NONE, BEFORE, UNDER, ALONE = SIDES = ("no copies", "before", "under", "copies alone")
SHORTEST_SECONDS = 1e-9


@dataclass(frozen=True)
class SideSeconds:
    """Seconds of one side: of the fastest round, of the median one, of the slowest."""

    best: float
    middle: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "SideSeconds":
        return cls(min(seconds), median(seconds), max(seconds))


class CopyRig:
    """One model with two runners over a pool of its own, which differ in when they copy.

    :param model: all layers in one group of pages; attached to this pool from now on.
    :param pages: the most pages that a step moves each way.
    """

    def __init__(self, model: PagedModel, pool_bytes: int, pages: int, clock: Clock) -> None:
        self.layout = plan_layout(model.description.layers, pool_bytes)
        (self._group,) = self.layout.groups
        self._clock, self._vocab = clock, model.description.vocab_size
        pool = torch.zeros(self.layout.pool_bytes, dtype=torch.uint8)
        buffer = torch.zeros(2 * pages * self._group.page_stride_bytes, dtype=torch.uint8)
        model.attach(self.layout, pool)
        self.mover = PageMover(self.layout, pool, buffer)
        self.under, self.before = (
            ModelRunner(model, self.layout, pool, buffer=buffer, spare_processor=spare)
            for spare in (True, False)
        )

    def plan(self, requests: int, new_tokens: int, context_tokens: int, pages: int) -> StepPlan:
        """Plan a step whose requests fetch their first pages, half of which it offloads before.

        :param context_tokens: tokens of each request after the step, ``new_tokens`` included.
        :param pages: number of pages to offload, and of pages to fetch.
        :raises ValueError: if the requests have fewer pages, or the pool has no room.
        """
        each = -(-context_tokens // self._group.page_tokens)
        if pages > each * requests or each * requests + pages > self._num_pages:
            shape = f"{requests}x{new_tokens}x{context_tokens}"
            raise ValueError(f"{shape}: its requests have no {pages} pages, or the pool no room")
        draw = np.random.default_rng(pages)
        own = draw.permutation(self._num_pages).astype(np.int32)
        tables, others = own[: each * requests], own[each * requests :]
        back = tables[:pages]
        half = pages // 2
        out = np.concatenate([back[:half], others[: pages - half]])
        held = draw.permutation(2 * pages).astype(np.int32)
        handles, positions = np.divmod(np.arange(len(tables)), each)
        new = np.stack([handles, 0 * handles, positions, tables], 1).astype(np.int32)
        start = context_tokens - new_tokens
        return StepPlan(
            StepNumber(1),
            offloads=_rows(out, held[:pages]),
            fetches=_rows(held[pages:], back),
            new_pages=new,
            work=tuple(self._work(n, start, new_tokens, draw) for n in range(requests)),
        )

    def rounds(self, plans: Sequence[StepPlan], count: int) -> list[dict[str, SideSeconds]]:
        """Time all sides of all plans in turn, ``count`` times, after one round that warms up.

        A disturbance on the machine thus affects all plans and sides alike.
        """
        sides = [self._sides(plan) for plan in plans]
        seconds: list[dict[str, list[float]]] = [{side: [] for side in SIDES} for _ in plans]
        for number in range(count + 1):
            for runs, times in zip(sides, seconds, strict=True):
                for side, run in runs.items():
                    began_seconds = self._clock.now_seconds()
                    run()
                    took_seconds = self._clock.now_seconds() - began_seconds
                    if number:
                        times[side].append(max(SHORTEST_SECONDS, took_seconds))
        return [{side: SideSeconds.of(some) for side, some in times.items()} for times in seconds]

    def _sides(self, plan: StepPlan) -> dict[str, Callable[[], object]]:
        bare = replace(plan, offloads=plan.offloads[:0], fetches=plan.fetches[:0])
        return {
            NONE: lambda: self.under.run(bare),
            BEFORE: lambda: self.before.run(plan),
            UNDER: lambda: self.under.run(plan),
            ALONE: lambda: self._move(plan),
        }

    def _move(self, plan: StepPlan) -> None:
        self.mover.offload(plan.offloads)
        self.mover.fetch(plan.fetches)

    @property
    def _num_pages(self) -> int:
        return self.layout.pool_bytes // self._group.page_stride_bytes

    def _work(self, number: int, start: int, count: int, draw: np.random.Generator) -> TokenWork:
        ids = draw.integers(0, self._vocab, count).astype(np.int32)
        greedy = SamplingParams(temperature=0)
        spec = RequestSpec(RequestId(str(number)), b"", greedy)
        return TokenWork(spec, number, start, count, ids, samples=True, output_index=0)


def _rows(first: NewPages, second: NewPages) -> NewPages:
    return np.stack([np.zeros(len(first)), first, second], 1).astype(np.int32)


def moved_bytes(plan: StepPlan, layout: Layout) -> int:
    return (len(plan.offloads) + len(plan.fetches)) * layout.groups[0].page_stride_bytes


REQUESTS, CONTEXT_TOKENS = 4, 256
PAGES = (32, 64)
"""Numbers of pages that a timed step offloads; it fetches as many."""
ROUNDS = 16
MOST_SLOWS = 3.0
STEPS_OF_ONE = 100

Measured = tuple[StepPlan, Mapping[str, SideSeconds]]


@dataclass(frozen=True)
class KnownSeconds:
    """A machine that takes the seconds of the step without copies."""

    seconds: float
    request_seconds: float = 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        return self.seconds


def link_of(
    plan: StepPlan,
    seen: Mapping[str, SideSeconds],
    layout: Layout,
    *,
    on_host: bool,
    slows: float = 1.0,
) -> WithHostLink:
    rate = moved_bytes(plan, layout) / seen[ALONE].middle
    machine = KnownSeconds(seen[NONE].middle)
    return WithHostLink(machine, layout, rate, on_host=on_host, slows=slows)


def fit_slowdown(measured: Sequence[Measured], layout: Layout) -> float:
    """Return the ``slows`` nearest to the medians during passes, of hundredths up to MOST_SLOWS.

    The sum of relative misses decides, so that one disturbed step is outvoted.
    """

    def miss(slows: float) -> float:
        timed = (
            (link_of(plan, seen, layout, on_host=True, slows=slows).step_seconds(plan), seen)
            for plan, seen in measured
        )
        return sum(abs(seconds / seen[UNDER].middle - 1) for seconds, seen in timed)

    return min((n / STEPS_OF_ONE for n in range(int(MOST_SLOWS * STEPS_OF_ONE) + 1)), key=miss)


def can_measure(model: PagedModel) -> bool:
    """Return whether copies during a pass can be timed: one group of pages, on a CPU."""
    if model.device.type != "cpu" or model.images is not None:
        return False
    groups = plan_layout(model.description.layers, 1 << 30).groups
    return len(groups) == 1 and groups[0].kind in BY_LAYER


def measure_host_copies(
    model: PagedModel, clock: Clock, *, under_pass: bool, rounds: int = ROUNDS
) -> HostCopies:
    """Time steps that copy pages, and fit their cost.

    The model is attached to a small pool of its own from then on.

    :param under_pass: whether the engine copies during passes here.
    :returns: the default, unmeasured, unless :func:`can_measure`.
    """
    if not can_measure(model):
        return HostCopies()
    layers = model.description.layers
    layout = plan_layout(layers, 1 << 30)
    pages = max(PAGES) * layout.groups[0].page_stride_bytes + layout.large_page_bytes
    pool_bytes = REQUESTS * pool_bytes_for(layout, CONTEXT_TOKENS) + pages
    rig = CopyRig(model, pool_bytes, max(PAGES), clock)
    plans = [rig.plan(REQUESTS, 1, CONTEXT_TOKENS, count) for count in PAGES]
    measured = list(zip(plans, rig.rounds(plans, rounds), strict=True))
    rate = median(moved_bytes(plan, rig.layout) / seen[ALONE].middle for plan, seen in measured)
    return HostCopies(rate, under_pass, fit_slowdown(measured, rig.layout))
