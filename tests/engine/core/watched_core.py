"""An engine core whose pages and misses can be looked at, over a model that needs no memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvell.engine.core.core import EngineCore
from kvell.engine.core.miss_watch import MissWatch
from kvell.engine.core.page_map import PageMap
from kvell.engine.protocol.messages import Event
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.memory import Layout, VisibleCore, create_core
from tests.engine.conftest import EOS, make_submit

LIMITS = Limits(64, 8, 400, 1000, min_chunk_tokens=16, max_prefix_wait_steps=0)


@dataclass
class WatchedCore:
    """Steps make the token 7 for every request that is due."""

    core: EngineCore
    memory: VisibleCore
    plans: list[StepPlan]

    @classmethod
    def over(cls, layout: Layout, *, watched: bool = True, depth: int = 0) -> "WatchedCore":
        memory = create_core(layout)
        misses = MissWatch(memory) if watched else None
        limits = replace(LIMITS, depth=depth)
        return cls(EngineCore(memory, limits, frozenset({EOS}), misses=misses), memory, [])

    @property
    def page_map(self) -> PageMap:
        return PageMap(self.core, self.memory)

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 2, salt: str = "") -> None:
        self.core.submit(make_submit(name, prompt, max_tokens, salt=salt))

    def step(self) -> list[Event]:
        plan = self.core.plan()
        self.plans.append(plan)
        return self.core.commit(
            StepResult(plan.step, tuple(7 for work in plan.work if work.samples))
        )

    def run(self) -> None:
        for _ in range(400):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("requests are left over")

    def answer(self, name: str, prompt: Sequence[int], max_tokens: int = 2, salt: str = "") -> None:
        self.submit(name, prompt, max_tokens, salt)
        self.run()
