"""What copies between pool and CPU buffer cost, and how much they slow a pass beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvell.calibration.copy_rig import ALONE, NONE, UNDER, CopyRig, Seen, moved_bytes
from kvell.clock import Clock
from kvell.cost.calibration import HostCopies
from kvell.engine.requests.plan import StepPlan
from kvell.memory import Layout, plan_layout, pool_bytes_for
from kvell.models.paged_model import PagedModel
from kvell.pages.stages import BY_LAYER
from kvell.simulator.replay.host_link import WithHostLink

REQUESTS, CONTEXT_TOKENS = 4, 256
PAGES = (32, 64)
"""So many pages go out in a timed step, and as many come in."""
ROUNDS = 16
MOST_SLOWS = 3.0
STEPS_OF_ONE = 100

Measured = tuple[StepPlan, Mapping[str, Seen]]


@dataclass(frozen=True)
class KnownSeconds:
    """A machine that takes what the step without copies took."""

    seconds: float
    request_seconds: float = 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        """See :class:`kvell.simulator.replay.runner.StepTimer`."""
        return self.seconds


def link_of(
    plan: StepPlan, seen: Mapping[str, Seen], layout: Layout, *, on_host: bool, slows: float = 1.0
) -> WithHostLink:
    """The replay's link at the rate of the copies alone; medians of rounds."""
    rate = moved_bytes(plan, layout) / seen[ALONE].middle
    machine = KnownSeconds(seen[NONE].middle)
    return WithHostLink(machine, layout, rate, on_host=on_host, slows=slows)


def fitted(measured: Sequence[Measured], layout: Layout) -> float:
    """The ``slows`` nearest to the medians under passes, of hundredths from 0 to MOST_SLOWS.

    The sum of relative misses decides, so that one step that met a neighbour is outvoted.
    """

    def miss(slows: float) -> float:
        told = (
            (link_of(plan, seen, layout, on_host=True, slows=slows).step_seconds(plan), seen)
            for plan, seen in measured
        )
        return sum(abs(seconds / seen[UNDER].middle - 1) for seconds, seen in told)

    return min((n / STEPS_OF_ONE for n in range(int(MOST_SLOWS * STEPS_OF_ONE) + 1)), key=miss)


def can_measure(model: PagedModel) -> bool:
    """Whether copies beside this model's passes can be timed: one group of pages, on a CPU."""
    if model.device.type != "cpu" or model.images is not None:
        return False
    groups = plan_layout(model.description.layers, 1 << 30).groups
    return len(groups) == 1 and groups[0].kind in BY_LAYER


def measure_host_copies(
    model: PagedModel, clock: Clock, *, under_pass: bool, rounds: int = ROUNDS
) -> HostCopies:
    """Time steps that copy pages, and fit what they cost.

    The model is attached to a small pool of its own from then on.

    :param under_pass: whether the engine copies beside passes here.
    :returns: nothing measured, if :func:`can_measure` says so.
    """
    if not can_measure(model):
        return HostCopies()
    layers = model.description.layers
    one = plan_layout(layers, 1 << 30)
    pages = max(PAGES) * one.groups[0].page_stride_bytes + one.large_page_bytes
    pool_bytes = REQUESTS * pool_bytes_for(one, CONTEXT_TOKENS) + pages
    rig = CopyRig(model, pool_bytes, max(PAGES), clock)
    plans = [rig.plan(REQUESTS, 1, CONTEXT_TOKENS, count) for count in PAGES]
    measured = list(zip(plans, rig.rounds(plans, rounds), strict=True))
    rate = median(moved_bytes(plan, rig.layout) / seen[ALONE].middle for plan, seen in measured)
    return HostCopies(rate, under_pass, fitted(measured, rig.layout))
