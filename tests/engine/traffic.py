"""An engine core with a virtual model behind it, driven a step at a time."""

from collections.abc import Sequence

from kvell.engine.core.core import EngineCore
from kvell.engine.protocol.messages import Cancel, Event, Finished, Submit, Tokens
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.memory import Layout, create_core
from kvell.pages.audit import audit
from kvell.vocabulary import RequestId
from tests.engine.conftest import EOS, make_submit
from tests.engine.virtual_model import VirtualModel, expected_output

Works = list[tuple[str, int, int]]


class Traffic:
    """Requests in, plans and events out; every step is audited."""

    def __init__(self, layout: Layout, limits: Limits) -> None:
        self.layout = layout
        self.core = EngineCore(create_core(layout), limits, frozenset({EOS}))
        self.events: list[Event] = []
        self.plans: list[StepPlan] = []
        self.prompts: dict[str, list[int]] = {}
        self._model = VirtualModel(layout)

    def submit(
        self, name: str, prompt: Sequence[int], max_tokens: int = 8, *, salt: str = ""
    ) -> None:
        self.prompts[name] = list(prompt)
        self.tell(make_submit(name, prompt, max_tokens, salt=salt))

    def tell(self, command: Submit) -> None:
        self.events += self.core.submit(command)

    def cancel(self, name: str) -> list[Event]:
        events = self.core.cancel(Cancel(RequestId(name)))
        self.events += events
        return events

    def plan(self) -> StepPlan:
        plan = self.core.plan()
        self.plans.append(plan)
        return plan

    def finish_step(self, plan: StepPlan) -> list[Event]:
        """Run and commit, with the model's own tokens."""
        return self.commit(self._model.run(plan))

    def answer(self, plan: StepPlan, *token_ids: int) -> list[Event]:
        return self.commit(StepResult(plan.step, token_ids))

    def commit(self, result: StepResult) -> list[Event]:
        events = self.core.commit(result)
        self.events += events
        assert audit(self.layout, self.core.memory.snapshot()) == []
        return events

    def step(self) -> Works:
        """Run one whole step; return what it computed as (request, start, count)."""
        plan = self.plan()
        self.finish_step(plan)
        return works(plan)

    def run(self, most_steps: int = 400) -> None:
        """Run until nothing is left to do; then every answer must be right."""
        for _ in range(most_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "requests are left over"
        for event in [e for e in self.events if isinstance(e, Finished)]:
            output = self.tokens(event.request_id)
            prompt, short_tokens = (
                self.prompts[event.request_id],
                self.core.limits.short_rope_tokens,
            )
            assert output == expected_output(prompt, len(output), short_rope_tokens=short_tokens)

    def tokens(self, name: str) -> list[int]:
        return [
            t
            for e in self.events
            if isinstance(e, Tokens) and e.request_id == name
            for t in e.token_ids
        ]

    def finished(self, name: str) -> Finished:
        (event,) = [e for e in self.events if isinstance(e, Finished) and e.request_id == name]
        return event

    def rung(self, name: str) -> int:
        return self.core.stats().rungs[name]


def works(plan: StepPlan) -> Works:
    return [(str(w.request_id), w.start, w.count) for w in plan.work]


def limits(batched: int = 32, seats: int = 8, max_len: int = 64, waits: int = 8) -> Limits:
    return Limits(
        max_num_batched_tokens=batched,
        max_num_seqs=seats,
        max_model_len=max_len,
        vocab_size=50,
        min_chunk_tokens=4,
        max_prefix_wait_steps=waits,
    )


def text(seed: int, length: int) -> list[int]:
    """Prompts of different seeds share nothing."""
    return [(seed * 11 + i * (seed + 3)) % 49 for i in range(length)]
