"""Replay of an engine's journal in virtual time: the same decisions again, without a model.

The journal has every input of the engine, including the model's answers; layout and limits are the
engine's. So plans, hits and evictions are the engine's too, and memory can be sampled as in the
replay of a trace.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvell.clock import VirtualClock
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Entry, apply
from kvell.engine.protocol.messages import Event, Finished
from kvell.engine.protocol.statistics import Stats
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from kvell.engine.requests.request import Request
from kvell.memory import LayerSpec, MemoryCore, facts_of
from kvell.simulator.cluster.meter import MeteredCore
from kvell.simulator.replay.runner import StepTimer
from kvell.simulator.report.metrics import MemoryMeter, RunningRequest, StepMeans
from kvell.vocabulary import RequestId


@dataclass(frozen=True)
class JournaledStep:
    """A plan, and the counters after it was made, by group in the order of the layout.

    :param end_seconds: virtual time at which the step ends.
    """

    plan: StepPlan
    end_seconds: float
    evicted_pages: tuple[int, ...]
    hit_tokens: tuple[int, ...]


@dataclass(frozen=True)
class JournalReport:
    """The decisions of an engine.

    :param finished: the end of each request, with its hit tokens.
    :param stats: gauges and counters at the end.
    :param means: memory over the steps.
    """

    steps: tuple[JournaledStep, ...]
    finished: dict[RequestId, Finished]
    stats: Stats
    means: StepMeans

    @property
    def plans(self) -> list[StepPlan]:
        return [step.plan for step in self.steps]


def replay_journal(
    entries: Iterable[Entry],
    core: MemoryCore,
    layers: Sequence[LayerSpec],
    limits: Limits,
    machine: StepTimer,
    eos_token_ids: frozenset[int] = frozenset(),
) -> JournalReport:
    """Feed a journal to a new engine core over ``core``.

    :param core: an empty memory core of the engine's layout.
    :param layers: the model's layers, which determine the tokens that are still needed.
    :param limits: the engine's.
    :param machine: gives each step its duration.
    :param eos_token_ids: the engine's.
    :raises ValueError: if the journal is of a different engine: a result matches no plan.
    """
    again = _Again(MeteredCore(core), layers, limits, machine, eos_token_ids)
    for entry in entries:
        again.take(entry)
    stats = again.engine.stats()
    return JournalReport(tuple(again.steps), again.finished, stats, again.means)


@dataclass
class _Again:
    """An engine that receives the inputs of another one."""

    memory: MeteredCore
    layers: Sequence[LayerSpec]
    limits: Limits
    machine: StepTimer
    eos_token_ids: frozenset[int]
    steps: list[JournaledStep] = field(default_factory=list)
    finished: dict[RequestId, Finished] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.engine = EngineCore(self.memory, self.limits, self.eos_token_ids)
        self.means = StepMeans(self.memory.layout)
        self._meter = MemoryMeter(self.memory.layout, self.layers)
        self.memory.on_advanced = self._look

    def take(self, entry: Entry) -> None:
        """Apply the engine's next input."""
        outcome = apply(entry, self.engine)
        if isinstance(outcome, StepPlan):
            self._note_plan(outcome)
        else:
            self._note(outcome)

    def _note_plan(self, plan: StepPlan) -> None:
        self.clock.advance(self.machine.step_seconds(plan))
        totals = self.memory.totals()
        self.steps.append(
            JournaledStep(
                plan, self.clock.now_seconds(), totals.evicted_pages, totals.group_hit_tokens
            )
        )

    def _look(self) -> None:
        waits = self.engine.counters.num_waiting > 0
        running = [self._progress(request) for request in self.engine.running]
        sample = self._meter.sample(running, self.memory.totals(), leaves_waiting=waits)
        self.means.samples.append(sample)

    def _progress(self, request: Request) -> RunningRequest:
        length, hit = len(request.prompt), self.engine.memory.hit_tokens(request.handle)
        facts = facts_of(length, length, request.images)
        return RunningRequest(request.settled, hit, facts, request.model)

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.finished[event.request_id] = event
