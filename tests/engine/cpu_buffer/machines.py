from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal
from kvell.engine.core.lateness import Lateness
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.protocol.messages import Finished, Tokens
from kvell.engine.requests.plan import NewPages, StepPlan
from kvell.engine.requests.request import Request
from kvell.pages.audit import audit
from tests.elastic.buffer_audit import audit_pages
from tests.engine.conftest import make_layout, make_submit
from tests.engine.planning.machine import Configuration, EngineMachine
from tests.engine.swapping import AtRandom, swapping_core
from tests.engine.virtual_model import VirtualModel
from tests.journaled import JournaledCore

SMALL = make_layout((0, 9), 12)


class Run:
    """Requests over an engine core with a buffer; every step is audited."""

    def __init__(self, core: EngineCore, journal: Journal | None = None) -> None:
        self.core, self.plans = core, list[StepPlan]()
        self.told = JournaledCore(core, journal)
        self.model = VirtualModel(core.memory.layout)
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Finished] = {}

    @property
    def swapping(self) -> Swapping:
        swapping = self.core.scheduler.swapping
        assert swapping is not None
        return swapping

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 20) -> None:
        self.told.tell(make_submit(name, prompt, max_tokens))

    def step(self) -> StepPlan:
        plan = self.told.plan()
        self.plans.append(plan)
        for event in self.told.commit(self.model.run(plan)):
            if isinstance(event, Tokens):
                self.outputs.setdefault(event.request_id, []).extend(event.token_ids)
            elif isinstance(event, Finished):
                self.ended[event.request_id] = event
        assert audit(self.core.memory.layout, self.core.memory.snapshot()) == []
        assert audit_pages(self.swapping.buffer) == []
        return plan

    def until_swapped(self) -> StepPlan:
        while True:
            plan = self.step()
            if len(plan.offloads):
                return plan

    def to_the_end(self) -> None:
        while self.core.has_work:
            self.step()
        assert not any(self.core.memory.snapshot().used)
        self.swapping.begin()
        assert self.swapping.buffer.used_large == 0


class Losing(Swapping):
    """A buffer that loses its content and refuses pages at random, from a seed."""

    seed = 0

    def resume(self, request: Request) -> None:
        if self._next_holder % 3 == 1:
            self.forget(request)
        super().resume(request)

    def save(self, request: Request, *, asks: bool = True) -> NewPages:
        if (request.computed + request.preemptions) % 4 == 3:
            return np.empty((0, 3), np.int32)
        return super().save(request, asks=asks)


class SwappingMachine(EngineMachine):
    """Random traffic with a small buffer that refuses and loses pages: the same answers."""

    configurations = (Configuration(), Configuration(depth=1))
    keeps_prefixes = False

    def fresh(self) -> EngineCore:
        some = self.layout.num_large_pages * 7 + self.limits.max_num_seqs
        make = Losing if some % 2 else Swapping
        return swapping_core(self.layout, self.limits, some % 31, AtRandom(some), make=make)

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        swapping = self.engine.core.scheduler.swapping
        assert swapping is not None
        assert audit_pages(swapping.buffer) == []
        given = {(g, page) for _, g, _, page in plan.new_pages.tolist()}
        targets = [(g, page) for g, _, page in plan.fetches.tolist()]
        assert len(set(targets)) == len(targets)
        assert given.issuperset(targets), "a fetch writes into a page that was not given with it"
        assert not {(c.group, c.target) for c in plan.copies}.intersection(targets)
        gave_way = plan.preempted or plan.parked or self.keeps_prefixes
        assert gave_way or not len(plan.offloads)


def parking_of(core: EngineCore) -> Parking:
    parking = core.scheduler.parking
    assert parking is not None
    return parking


class ParkingMachine(SwappingMachine):
    """Random traffic, random lateness, a buffer that is short: the same answers."""

    def fresh(self) -> EngineCore:
        some = self.layout.num_large_pages * 7 + self.limits.max_num_seqs
        make = Losing if some % 2 else Swapping
        return swapping_core(
            self.layout,
            self.limits,
            some % 31,
            AtRandom(some),
            make=make,
            ahead=1 + some % 17,
        )

    @rule(ttft_late=st.booleans(), tpot_late=st.booleans(), times=st.integers(1, 4))
    def late(self, ttft_late: bool, tpot_late: bool, times: int) -> None:
        for _ in range(times):
            self.engine.note(Lateness(ttft_late, tpot_late))

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        parking = parking_of(self.engine.core)
        num_offloaded = len(self.engine.core.scheduler.seats.offloaded)
        assert len(parking.sizes.held) == len(parking.parked) + num_offloaded
        assert not {work.request_id for work in plan.work}.intersection(plan.parked)
