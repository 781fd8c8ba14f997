"""One engine behind the instance protocol: commands in, events out, a step at a time."""

from kvell.elastic.arena import ActivationArena, ActivationModel
from kvell.engine.contract import MemoryContract
from kvell.engine.core import EngineCore
from kvell.engine.journal import Journal, JournaledCore
from kvell.engine.plan import StepPlan
from kvell.engine.protocol import (
    SCHEMA_VERSION,
    AskStats,
    Command,
    Drain,
    Event,
    Ready,
)
from kvell.engine.runner import Runner

CREDITS = 1024
"""Requests a front may have submitted and not seen finished."""


class Engine:
    """Ties core, runner and arena together; owns no policy."""

    def __init__(
        self,
        core: EngineCore,
        runner: Runner,
        contract: MemoryContract,
        activations: ActivationModel,
        *,
        journal: Journal | None = None,
        incarnation: int = 0,
    ) -> None:
        self.core = core
        self.contract = contract
        self.arena = ActivationArena(contract.activation_reserve_bytes)
        self._told = JournaledCore(core, journal)
        self._runner = runner
        self._activations = activations
        self._incarnation = incarnation

    def ready(self) -> Ready:
        """The first event of an instance."""
        return Ready(
            SCHEMA_VERSION,
            self._incarnation,
            CREDITS,
            self.contract.model,
            self.contract.max_model_len,
            self.contract.kv_pool_bytes,
        )

    def handle(self, command: Command) -> list[Event]:
        """Take a command; answers that need no step come at once."""
        if isinstance(command, AskStats):
            return [self.core.stats()]
        if isinstance(command, Drain):
            return []  # the gate in front of the engine refuses what comes after
        return self._told.tell(command)

    def has_work(self) -> bool:
        """Is any request waiting or running?"""
        return self.core.has_work

    def step(self) -> list[Event]:
        """One plan, its run and its commit."""
        plan = self._told.plan()
        need_bytes = self._need_bytes(plan)
        if not self.arena.grant(need_bytes):
            raise RuntimeError(f"step {plan.step} needs {need_bytes} bytes of activations")
        try:
            result = self._runner.run(plan)
        finally:
            self.arena.release(need_bytes)
        return self._told.commit(result)

    def _need_bytes(self, plan: StepPlan) -> int:
        return self._activations.need_bytes(plan.num_tokens, plan.num_logits)
