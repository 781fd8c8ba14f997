from dataclasses import replace

from kvell.clock import VirtualClock
from kvell.device.chunks import ChunkDevice
from kvell.elastic.arena import ActivationModel
from kvell.engine.core.journal import Journal
from kvell.engine.engine import Engine
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.setup.contract import make_contract
from tests.engine.conftest import make_engine_core, make_layout
from tests.engine.traffic import limits
from tests.engine.virtual_model import VirtualModel

LAYOUT = make_layout((0, 9), 40)

ACTIVATIONS = ActivationModel(fixed_bytes=100, token_bytes=10, logits_row_bytes=50)


class Watched(VirtualModel):
    """Records what is granted while a step runs; fails on command."""

    def __init__(self) -> None:
        super().__init__(LAYOUT)
        self.engine: Engine | None = None
        self.granted: list[int] = []
        self.failure: Exception | None = None
        self.clock = VirtualClock()

    def run(self, plan: StepPlan) -> StepResult:
        assert self.engine is not None
        self.granted.append(self.engine.arena.granted_bytes)
        if self.failure is not None:
            raise self.failure
        self.clock.advance(1.0)
        return super().run(plan)


def make_engine(
    reserve_bytes: int = 10_000,
    journal: Journal | None = None,
    depth: int = 0,
    cold: ChunkDevice | None = None,
) -> tuple[Engine, Watched]:
    contract = make_contract("virtual", LAYOUT, 0, reserve_bytes, 64)
    runner = Watched()
    core = make_engine_core(LAYOUT, replace(limits(), depth=depth))
    engine = Engine(
        core,
        runner,
        contract,
        ACTIVATIONS,
        journal=journal,
        incarnation=4,
        clock=runner.clock,
        cold=cold,
    )
    runner.engine = engine
    return engine, runner
