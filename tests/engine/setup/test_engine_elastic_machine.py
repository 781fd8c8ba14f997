"""Balloon, memory core, CPU buffer and scheduler under random traffic, over a device that refuses.

Mappings are refused by a rule that only counts calls, so that a replay is refused the same ones;
the buffer is small, refuses and loses pages; memory is committed while requests run.  Every
answer is right, or refused with the device's reason, and at the end nothing is left anywhere.
"""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvell.elastic.arena import ActivationModel
from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.core.core import EngineCore
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.protocol.messages import Finished
from kvell.engine.requests.plan import StepPlan
from kvell.engine.setup.sharing import share_pool
from kvell.memory import create_core
from tests.depth import machine
from tests.elastic.balloon_audit import audit_elastic
from tests.engine.conftest import EOS
from tests.engine.cpu_buffer.machines import Losing, ParkingMachine, parking_of
from tests.engine.planning.shared_traffic import longest
from tests.engine.setup.elastic_traffic import MORE_LARGE, TOKENS_A_CHUNK, Refusing
from tests.engine.swapping import AtRandom
from tests.engine.virtual_model import VirtualModel, expected_output


class ElasticMachine(ParkingMachine):
    """One pool for KV and activations and a buffer, both unreliable."""

    may_rest = True
    chunk_bytes = 0

    def fresh(self) -> EngineCore:
        some = self.layout.num_large_pages * 7 + self.limits.max_num_seqs
        large_bytes = self.layout.large_page_bytes
        if not self.chunk_bytes:
            self.chunk_bytes = [large_bytes // 2, large_bytes, large_bytes * 3 // 2][some % 3]
            num_large = self.layout.num_large_pages + MORE_LARGE
            self.layout = replace(self.layout, num_large_pages=num_large)
            self.need = ActivationModel(0, self.chunk_bytes // TOKENS_A_CHUNK, 0)
            most = longest(self.layout, self.need, self.chunk_bytes)
            self.limits = replace(self.limits, max_model_len=most)
            self.some = some
        core = create_core(self.layout)
        device = Refusing(-(-self.layout.pool_bytes // self.chunk_bytes), self.chunk_bytes)
        shared = share_pool(device, self.layout, core, self.need, None, device.num_chunks // 2)
        device.every = self.some % 5
        make = Losing if self.some % 2 else Swapping
        num_large = self.some % 31
        swapping = make(core, PageBuffer(self.layout.groups, num_large), AtRandom(self.some))
        sizes = CpuBuffer(num_large, 1 + self.some % 17)
        parking = Parking(core, swapping, sizes, self.limits.min_chunk_tokens)
        return EngineCore(
            core,
            self.limits,
            frozenset({EOS}),
            memory=shared.steps,
            swapping=swapping,
            parking=parking,
            buffer_large=self.layout.num_large_pages + 1,
        )

    def make_model(self) -> VirtualModel:
        first = self.layout.num_large_pages + 1
        buffer = range(first, first + self.some % 31)
        return VirtualModel(self.layout, words=self.chosen.words, buffer=buffer)

    @property
    def shared(self) -> SharedMemory:
        memory = self.engine.core.scheduler.chunks.memory
        assert isinstance(memory, SharedMemory)
        return memory

    @rule(count=st.integers(1, 5))
    def warm(self, count: int) -> None:
        if not self.shared.is_complete:
            self.engine.warm(count)

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        assert audit_elastic(self.shared.memory) == []
        assert (plan.slot is not None) == bool(plan.work)
        if plan.slot is not None:
            need_bytes = self.need.need_bytes(plan.num_tokens, plan.num_logits)
            assert plan.slot.num_chunks * self.chunk_bytes >= need_bytes

    def check_answer(self, event: Finished) -> None:
        if not (event.reason == "refused" and event.try_later):
            super().check_answer(event)
            return
        assert "the device refused memory" in event.message
        output = self.outputs[event.request_id]
        assert output == expected_output(
            self.prompts[event.request_id][0], len(output), self.chosen.words
        )

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while not self.shared.is_complete:
            self.engine.warm(1)
        super().teardown()
        swapping, parking = self.engine.core.scheduler.swapping, parking_of(self.engine.core)
        assert swapping is not None
        swapping.begin()
        assert swapping.buffer.used_large == 0
        assert not parking.parked
        assert not parking.sizes.held
        assert audit_elastic(self.shared.memory) == []


TestElasticMachine = ElasticMachine.TestCase
TestElasticMachine.settings = machine(weight=0.3)
