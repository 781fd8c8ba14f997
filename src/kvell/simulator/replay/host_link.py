"""The link to host memory in virtual time: seconds of copies to the CPU buffer and back.

The runner's own :func:`~kvell.engine.running.copies.copy_order.copy_order` decides which copies
precede a pass and which run during it, so that a replay charges the runner's cost.
"""

from dataclasses import dataclass, field

from kvell.engine.cpu_buffer.swapping import moved_bytes
from kvell.engine.requests.plan import NewPages, StepPlan
from kvell.engine.running.copies.copy_order import copy_order
from kvell.memory import Layout
from kvell.pages.stages import stages_of
from kvell.simulator.replay.runner import CalibratedMachine, StepTimer

WAITS = 0


@dataclass(frozen=True)
class WithHostLink:
    """A machine whose steps copy the pages that a plan moves, as the real runner does.

    Pages that move during the pass do so stage by stage. The pass waits for the first stage of the
    pages that it needs; the others use part of its processors and memory::

        copying    1 │ 2 │ 3 │ … │ S │ pages that no layer waits for
        computing      1 │ 2 │ 3 │ … │ S

    :param bytes_per_second: of a copy by itself, one way.
    :param on_host: the pool is host memory; on a GPU all copies are made before the pass.
    :param slows: seconds lost for each second of copies during the pass, or of the pass during
        longer copies: 0 if they share nothing, 1 if nothing is gained, more if copies during a pass
        cost more than before it.
    :param streamed_layers: not WAITS: the assumption of eLLM §4.3.2, which no runner here meets.
        Each of this number of layers is computed while the next one's pages move, out and in
        together.
    :param buffer_large: number of the buffer's first large page, counted from the pool's first: the
        work of requests with pages there is *staged*. It writes its keys and values over the link,
        and reads those of its earlier tokens, layer by layer. None: no work is; in a pool in host
        memory this costs nothing.
    """

    machine: StepTimer
    layout: Layout
    bytes_per_second: float
    on_host: bool = False
    slows: float = 1.0
    streamed_layers: int = WAITS
    buffer_large: int | None = None
    _staged: set[int] = field(default_factory=set)

    @property
    def request_seconds(self) -> float:
        return self.machine.request_seconds

    def step_seconds(self, plan: StepPlan) -> float:
        computing = self.machine.step_seconds(plan)
        if self.buffer_large is not None and not self.on_host:
            computing = self._with_staged(plan, self.buffer_large, computing)
        if not len(plan.offloads) and not len(plan.fetches):
            return computing
        if self.streamed_layers != WAITS:
            moving = max(self._seconds(plan.offloads), self._seconds(plan.fetches))
            return max(computing, moving) + moving / self.streamed_layers
        groups = self.layout.groups
        order = copy_order(plan, groups, on_host=self.on_host)
        before = self._seconds(order.first_out) + self._seconds(order.first_in)
        if not order.is_under_pass:
            return before + computing
        needed = self._seconds(order.layered_out) + self._seconds(order.layered_in)
        stages = max(1, *(len(stages_of(groups, work.spec.model)) for work in plan.work))
        waited = needed / stages
        beside = needed - waited + self._seconds(order.last_out)
        together = max(computing, beside) + self.slows * min(computing, beside)
        return before + waited + together

    def _with_staged(self, plan: StepPlan, buffer_large: int, computing: float) -> float:
        """Return the seconds of a pass while whose layers the link writes and reads staged KV."""
        self._staged.difference_update(plan.released)
        groups = self.layout.groups
        self._staged.update(
            handle
            for handle, group, _, page in plan.new_pages.tolist()
            if page >= buffer_large * groups[group].pages_per_large
        )
        out_bytes = in_bytes = 0
        for work in plan.work:
            if work.handle in self._staged:
                token_bytes = sum(
                    group.page_stride_bytes // group.page_tokens
                    for group in groups
                    if group.model == work.spec.model and group.kind.counts_tokens
                )
                out_bytes += work.count * token_bytes
                in_bytes += work.start * token_bytes
        moving = max(out_bytes, in_bytes) / self.bytes_per_second
        stages = max(1, *(len(stages_of(groups, work.spec.model)) for work in plan.work), 1)
        return max(computing, moving) + moving / stages

    def _seconds(self, rows: NewPages) -> float:
        return moved_bytes(rows, self.layout.groups) / self.bytes_per_second


def calibrated_link(machine: CalibratedMachine, layout: Layout) -> WithHostLink:
    """Return a machine with the copies to its CPU buffer as ``kvell calibrate`` measured them.

    A calibration that did not measure copies of pages gives the rate of a plain copy.
    """
    measured = machine.calibration
    rate = measured.copies.bytes_per_second or measured.copy_bytes_per_second
    under = measured.copies.are_under_pass
    return WithHostLink(machine, layout, rate, on_host=under, slows=measured.copies.slows)
