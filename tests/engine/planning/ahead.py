from collections import deque

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal
from kvell.engine.protocol.messages import Cancel, Event, Submit, Tokens
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.memory import create_core
from kvell.pages.audit import audit
from kvell.pages.layout import Layout
from tests.engine.conftest import EOS, make_submit
from tests.engine.traffic import limits
from tests.engine.virtual_model import VirtualModel
from tests.journaled import JournaledCore


def depth_one(batched: int = 16, seats: int = 8) -> Limits:
    return Limits(**{**vars(limits(batched=batched, seats=seats)), "depth": 1})


class Ahead:
    """An engine core whose steps run as late as possible: when their results are due."""

    def __init__(
        self,
        layout: Layout,
        chosen: Limits | None = None,
    ) -> None:
        self.layout = layout
        self.chosen = chosen or depth_one()
        self.journal = Journal()
        self.told = JournaledCore(self.fresh(), self.journal)
        self.core = self.told.core
        self.model = VirtualModel(layout)
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()
        self.events: list[Event] = []

    def fresh(self) -> EngineCore:
        return EngineCore(create_core(self.layout), self.chosen, frozenset({EOS}))

    def submit(self, name: str, prompt: list[int], max_tokens: int = 8) -> None:
        self.tell(make_submit(name, prompt, max_tokens))

    def tell(self, command: Submit | Cancel) -> list[Event]:
        events = self.told.tell(command)
        self.events += events
        return events

    def plan(self) -> StepPlan:
        plan = self.told.plan()
        self.plans.append(plan)
        self.in_flight.append(plan)
        return plan

    def commit(self, *token_ids: int) -> list[Event]:
        """Commit the oldest step, with the model's own tokens or these."""
        plan = self.in_flight.popleft()
        result = StepResult(plan.step, token_ids) if token_ids else self.model.run(plan)
        events = self.told.commit(result)
        self.events += events
        assert audit(self.layout, self.core.memory.snapshot()) == []
        return events

    def may_plan(self) -> bool:
        return self.core.may_plan

    def step(self) -> list[Event]:
        while self.core.may_plan:
            self.plan()
        return self.commit()

    def run(self, most_steps: int = 400) -> None:
        for _ in range(most_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("requests are left over")

    def tokens(self, name: str) -> list[int]:
        told = [e for e in self.events if isinstance(e, Tokens) and e.request_id == name]
        return [token for event in told for token in event.token_ids]

    def used(self) -> int:
        return sum(self.core.memory.snapshot().used)
