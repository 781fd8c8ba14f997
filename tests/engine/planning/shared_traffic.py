from collections.abc import Callable
from dataclasses import replace

from kvell.device.chunks import ChunkDevice
from kvell.elastic.arena import ActivationModel
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.tiling import Tiling
from kvell.engine.core.core import EngineCore
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.protocol.messages import Event
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from kvell.memory import Layout, create_core, longest_request
from tests.device.fake_chunks import FakeChunks
from tests.elastic.balloon_audit import audit_elastic
from tests.engine.conftest import EOS
from tests.engine.traffic import Traffic
from tests.pages.pools import group, pool_of

CHUNK_BYTES = 256


class Shared(Traffic):
    """Traffic over a pool that activations share; audited after each step."""

    def __init__(
        self,
        layout: Layout,
        chosen: Limits,
        model: ActivationModel,
        chunk_bytes: int = CHUNK_BYTES,
        device: Callable[[int, int], ChunkDevice] = FakeChunks,
        committed: int | None = None,
    ) -> None:
        super().__init__(layout, chosen)
        core = create_core(layout)
        num_chunks = -(-layout.pool_bytes // chunk_bytes)
        tiled = Tiling(num_chunks, chunk_bytes, layout.large_page_bytes, layout.num_large_pages)
        self.device = device(num_chunks, chunk_bytes)
        self.elastic = ElasticMemory(self.device, core, tiled, committed)
        self.shared = SharedMemory(core, self.elastic, model)
        self.core = EngineCore(core, chosen, frozenset({EOS}), memory=self.shared)

    def plan(self) -> StepPlan:
        plan = super().plan()
        assert audit_elastic(self.elastic) == []
        slots = [s for s in self.elastic.balloon.slots.segments if s.state == 2]
        if plan.work:
            need = self.shared.need.need_bytes(plan.num_tokens, plan.num_logits)
            assert sum(s.count for s in slots) * self.device.chunk_bytes >= need
        return plan

    def finish_step(self, plan: StepPlan) -> list[Event]:
        events = super().finish_step(plan)
        assert audit_elastic(self.elastic) == []
        return events


def longest(layout: Layout, model: ActivationModel, chunk_bytes: int = CHUNK_BYTES) -> int:
    kept_bytes = model.need_bytes(5, 1) + 2 * chunk_bytes
    lost = -(-kept_bytes // layout.large_page_bytes) + 1
    left = max(1, layout.num_large_pages - lost)
    return max(2, longest_request(replace(layout, num_large_pages=left), 44, 4))


def full(num_large: int) -> Layout:
    """Pages of four tokens, four in a large page of 256 bytes."""
    return pool_of(num_large, group(4, 4))
