"""Cost of copies between pool and CPU buffer, and how much they slow a concurrent pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvell.calibration.copy_rig import ALONE, NONE, UNDER, CopyRig, SideSeconds, moved_bytes
from kvell.clock import Clock
from kvell.cost.calibration import HostCopies
from kvell.engine.requests.plan import StepPlan
from kvell.memory import Layout, plan_layout, pool_bytes_for
from kvell.models.paged_model import PagedModel
from kvell.pages.stages import BY_LAYER
from kvell.simulator.replay.host_link import WithHostLink

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
    """Return the replay's link at the rate of the copies alone, with medians of rounds."""
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
