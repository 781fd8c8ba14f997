"""An engine for the instance protocol: it takes commands, runs steps and returns events.

At depth 0, each step is planned, run and committed before the next.  At depth 1, a device or a
second thread runs the steps in order; meanwhile the engine's thread plans the next step and commits
the previous one.  Compiled passes release the GIL.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from kvell.clock import Clock, MonotonicClock
from kvell.cost.prices import DEFAULT_PRICES, InstancePrices
from kvell.device.chunks import ChunkDevice
from kvell.elastic.arena import ActivationArena, ActivationNeed, RememberedNeed
from kvell.elastic.logical_buffer import WINDOW_ITERATIONS
from kvell.engine.core.core import EngineCore
from kvell.engine.core.index_watch import IndexWatch, indexed_groups
from kvell.engine.core.journal import Abandoned, CoreCommand, Journal, PlanAsked, Warmed
from kvell.engine.core.loop import EngineLoop
from kvell.engine.core.page_map import PageMap
from kvell.engine.failed_steps import FailedSteps
from kvell.engine.failing.failures import StepFailed, StepFailure
from kvell.engine.protocol.messages import (
    CREDITS,
    SCHEMA_VERSION,
    Acknowledgement,
    AskStats,
    Cancel,
    Command,
    Drain,
    Event,
    Finished,
    Introduce,
    KeepAlive,
    Lead,
    Ready,
    Submit,
    Tokens,
    refusal,
)
from kvell.engine.protocol.notices import WatchIndex
from kvell.engine.protocol.pages import AskLargePage, AskPages, LargePage, Pages
from kvell.engine.protocol.statistics import InstanceFacts, LoadStats, ModelWeights
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.engine_link import EngineLink
from kvell.engine.running.moved_images import MovedImages
from kvell.engine.running.recorded.starting import StartingModelRunner
from kvell.engine.running.runner import PreparingRunner, Runner
from kvell.engine.running.sent_images import SentImages
from kvell.engine.sampling.grammars import AwaitedGrammars, Grammars
from kvell.engine.setup.contract import MemoryContract
from kvell.engine.setup.objectives import ObjectiveWatch
from kvell.engine.setup.warmer import Warmer
from kvell.errors import ChangeSomething, TryLater
from kvell.mempool.entries import Draining
from kvell.models.images.image_store import ImageStore
from kvell.vocabulary import RequestId

logger = logging.getLogger(__name__)


Run = Callable[[Callable[[], StepResult]], StepResult]


class StepsAhead:
    """A thread that runs steps in order; :meth:`ask` is called from one other thread.

    ::

        steps   … run 1 ┐ ready 2 ┌ run 2 ────────────
                        │         ├ result 1
        loop            ┘ waits   └ commit 1 ─ plan 3 ─

    Two threads share Python's lock, which a compiled pass releases.  A thread that waits for step 1
    would wake at its end, and take the lock just when step 2 needs it to begin.  So a result is
    delivered only once the next step computes, some tenths of a millisecond later.
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-steps")
        self._asked = self._started = 0
        self._kept: tuple[Future[StepResult], StepResult] | None = None

    def ask(self, run: Callable[[], StepResult]) -> Future[StepResult]:
        """Run a step after all earlier ones; the future has its result or its exception."""
        answer: Future[StepResult] = Future()
        self._asked += 1
        self.thread.submit(self._answer, run, answer)
        return answer

    def start(self, runner: Runner, plan: StepPlan, run: Run) -> Callable[[], StepResult]:
        """Prepare a step, and let it run after all earlier ones; return what awaits its result."""
        if isinstance(runner, PreparingRunner):
            return self.ask(partial(run, runner.prepare(plan, self.begun))).result
        return self.ask(partial(run, partial(runner.run, plan))).result

    def begun(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            answer, result = kept
            answer.set_result(result)

    def settle(self) -> None:
        def forget() -> None:
            self._asked = self._started
            self._kept = None

        self.thread.submit(forget).result()

    def _answer(self, run: Callable[[], StepResult], answer: Future[StepResult]) -> None:
        self._started += 1
        try:
            result = run()
        except BaseException as failure:
            self.begun()
            answer.set_exception(failure)
            return
        self.begun()  # the step may have computed nothing
        self._kept = answer, result
        if self._started == self._asked:
            self.begun()


@dataclass
class _Stages:
    submitted_seconds: float
    admitted_seconds: float | None = None
    first_token_seconds: float | None = None

    def add_times(self, finished: Finished, now: float) -> Finished:
        admitted = now if self.admitted_seconds is None else self.admitted_seconds
        first = now if self.first_token_seconds is None else self.first_token_seconds
        return replace(
            finished,
            queue_seconds=admitted - self.submitted_seconds,
            prefill_seconds=first - admitted,
            decode_seconds=now - first,
        )


class StageTimes:
    """A stopwatch for requests, driven by the commands and events of a core.

    ::

        submitted ──queue──► first admitted ──prefill──► first token ──decode──► ended

    A preemption does not end a stage, as in vLLM.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stages: dict[RequestId, _Stages] = {}
        self._without_token = 0

    def on_submitted(self, request_id: RequestId) -> None:
        """Note a submitted request; a request in flight keeps its time."""
        if request_id not in self._stages:
            self._stages[request_id] = _Stages(self._clock.now_seconds())
            self._without_token += 1

    def on_admitted(self, request_ids: Iterable[RequestId]) -> None:
        """Note requests admitted by the step that begins now; only the first admission counts."""
        now = self._clock.now_seconds()
        for request_id in request_ids:
            stages = self._stages.get(request_id)
            if stages is not None and stages.admitted_seconds is None:
                stages.admitted_seconds = now

    def add_times(self, events: list[Event]) -> list[Event]:
        if not self._without_token and not any(type(event) is Finished for event in events):
            return events
        now = self._clock.now_seconds()
        return [self._told(event, now) for event in events]

    def _told(self, event: Event, now: float) -> Event:
        if isinstance(event, Tokens):
            stages = self._stages.get(event.request_id)
            if stages is not None and stages.first_token_seconds is None:
                stages.first_token_seconds = now
                self._without_token -= 1
        elif isinstance(event, Finished):
            stages = self._stages.pop(event.request_id, None)
            if stages is None:
                return event
            self._without_token -= stages.first_token_seconds is None
            return stages.add_times(event, now)
        return event


def without_images(command: Submit) -> Finished:
    problem = ChangeSomething("images", "…", "are unknown", "give them with the prompt")
    return refusal(command, problem)


STEP_SECONDS = 0.4
"""About the longest step with prompts of one tenant and requests of another."""
FIRST_TOKENS = 128
"""The prompt tokens of such a step before any step was timed."""
LEAST_TOKENS = 32
"""The fewest prompt tokens, so that prompts advance beside many answers too."""
TIMED_TOKENS = 16
"""Steps with fewer tokens are not timed."""


class StepPace:
    """The speed of recent steps, and the prompt tokens that follow from it.

    A step takes as long as its prompt tokens, and all others wait.  A tenant's prompts may delay
    its own requests; those of others for a bounded time only, whatever the machine's speed is now.
    """

    def __init__(self) -> None:
        self._token_seconds = STEP_SECONDS / FIRST_TOKENS

    def note(self, tokens: int, seconds: float) -> None:
        """Note a step's tokens and duration; a slow step counts at once, a fast one by half."""
        if tokens >= TIMED_TOKENS:
            latest = seconds / tokens
            self._token_seconds = max(latest, (latest + self._token_seconds) / 2)

    @property
    def shared_prompt_tokens(self) -> int:
        return max(LEAST_TOKENS, int(STEP_SECONDS / max(self._token_seconds, 1e-9)))


Ran = TypeVar("Ran")

NO_REQUESTS: frozenset[RequestId] = frozenset()
WARMING_SECONDS = 0.5
"""Longest wait of a step without work while the pool is still being committed."""


class Engine:
    """The core, the runner and the arena of one instance; contains no policy."""

    def __init__(
        self,
        core: EngineCore,
        runner: Runner,
        contract: MemoryContract,
        activations: ActivationNeed,
        *,
        journal: Journal | None = None,
        incarnation: int = 0,
        images: ImageStore | None = None,
        clock: Clock | None = None,
        warmer: Warmer | None = None,
        cold: ChunkDevice | None = None,
        objectives: ObjectiveWatch | None = None,
        grammars: Mapping[str, Grammars | None] = MappingProxyType({}),
        page_map: PageMap | None = None,
        link: EngineLink | None = None,
        staying: str = "",
        prices: InstancePrices = DEFAULT_PRICES,
        weights: Mapping[str, ModelWeights] = MappingProxyType({}),
    ) -> None:
        """:param activations: bytes of the activation reserve that a step without a slot needs.
        :param images: images of requests in flight.  The caller that submits prompts with images
        stores them; None for text models.
        :param warmer: commits the pool's memory while steps run; None if all is committed.
        :param cold: the pool's chunks, if only a first touch commits them.
        :param objectives: None: requests are never late.
        :param grammars: by model, the first model first; None if answers can follow no grammar.
        :param page_map: None: the engine shows no pages.
        :param link: the link to other instances, if the core has an agent; None: there is none.
        :param staying: the setting that keeps requests from moving; "" if they can move.
        :param weights: by model; "" is the first."""
        self.core = core
        self.images = images
        self.contract = contract
        self.arena = ActivationArena(contract.activation_reserve_bytes)
        self.runner = runner
        self.activations = RememberedNeed(activations)
        self._incarnation = incarnation
        self._clock = clock or MonotonicClock()
        self._times = StageTimes(self._clock)
        self._warmer, self.objectives = warmer, objectives
        self._page_map, self._staying, self._prices = page_map, staying, prices
        self._weights = dict(weights)
        self.link = link or EngineLink()
        self.loop = EngineLoop(core, self.link, journal)
        self.grammars = AwaitedGrammars(grammars, self.link.bell.ring, self._clock)
        self._sent_images = sent = SentImages(images, keeps_tensors=self.link.is_linked)
        if images is not None:
            self.link.move_images(lambda agent: MovedImages(images, sent, agent, core.has_request))
        self._notes_due = 0
        self._pace = StepPace()
        self._cold = cold
        self._behind: Warmer | None = None
        starts = isinstance(runner, StartingModelRunner)
        self._ahead = StepsAhead() if core.limits.depth and not starts else None
        self._running: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()
        self.failed_steps = FailedSteps(self._clock)

    def warm(self) -> Warmer | None:
        """Commit the whole pool in a background thread and in huge pages, for servers.

        Otherwise each prompt waits for the first touch of its pages.

        :returns: the warmer, on which the caller may wait; None if there is nothing to commit.
        """
        if self._cold is not None:
            self._behind = Warmer(self._cold, range(self._cold.num_chunks), is_patient=True)
            self._cold = None
        return self._behind

    def ready(self) -> Ready:
        first, beside = self.core.entrance.lengths(borrows=self.link.section_bytes > 0)
        facts = InstanceFacts(
            self._incarnation,
            CREDITS,
            self.contract.model,
            first.max_model_len,
            self.contract.kv_pool_bytes,
            beside,
            self.contract.parts(),
            sum(group.token_bytes for group in self.contract.groups),
            indexed_groups(
                self.core.memory.layout.groups,
                self.core.entrance.rules,
                is_cached=self.core.limits.enable_prefix_caching,
            ),
            self.link.listens,
            self._staying,
            self.link.section_bytes,
            first.reach_tokens,
            self.contract.dtype,
            tuple(self.contract.lines()),
            host=self.link.host,
            is_asked=self.link.asks,
            prices=self._prices.costs,
            prices_origin=self._prices.origin,
            weights=self._weights,
        )
        return Ready(SCHEMA_VERSION, facts)

    def pulse(self) -> LoadStats:
        return self.core.counters.load_stats(self.core.step, outside=self.grammars.count)

    def handle(self, command: Command) -> list[Event]:
        """Handle a command, and return the events that need no step."""
        if isinstance(command, AskStats):
            stats = self.core.stats()
            stats = replace(stats, waiting=stats.waiting + self.grammars.count)
            if isinstance(self.runner, StartingModelRunner):
                stats = replace(stats, device_steps=self.runner.device_steps())
            return [replace(stats, problems=self.core.audit()) if command.with_audit else stats]
        if isinstance(command, AskPages | AskLargePage):
            return [self._shown(command)]
        if isinstance(command, WatchIndex):
            if self._page_map is None or not self.core.limits.enable_prefix_caching:
                return []
            make = partial(IndexWatch, self._page_map.memory, with_tokens=command.with_tokens)
            return self.core.watch_index(make)
        if isinstance(command, Introduce):
            self.link.meet(command.addresses)
            return []
        if isinstance(command, KeepAlive | Lead):
            return []
        if isinstance(command, Drain):  # the gate in front of the engine refuses requests
            return self.loop.take(Draining())
        core_command: CoreCommand = command
        if isinstance(command, Submit) and command.spec.tensors:
            try:
                core_command = self._sent_images.take(command)
            except ChangeSomething as problem:
                return [refusal(command, problem)]
        events = self._handled(core_command)
        self._sent_images.release_ended(events)
        return events

    def _handled(self, command: CoreCommand) -> list[Event]:
        if isinstance(command, Submit) and not self._knows_images(command):
            return [without_images(command)]
        if isinstance(command, Submit):
            self._times.on_submitted(command.request_id)
            try:
                if self.grammars.awaits(command):
                    return []
            except (ChangeSomething, TryLater) as problem:
                return self._times.add_times([refusal(command, problem)])
        if isinstance(command, Cancel) and (waiting := self.grammars.cancel(command)):
            prompt_tokens = waiting.spec.prompt_tokens
            end = Finished(waiting.request_id, waiting.attempt, "cancelled", prompt_tokens)
            return self._times.add_times([end])
        return self._entered(command)

    def _entered(self, command: CoreCommand) -> list[Event]:
        events = self.loop.tell(command)
        self.grammars.follow(self.core.constrained.values())
        if self.objectives is not None and isinstance(command, Submit | Cancel):
            self.objectives.on_command(command, events)
        if isinstance(command, Submit):
            name = command.request_id
            if not any(type(event) is Finished and event.request_id == name for event in events):
                events = [Acknowledgement(name, command.attempt), *events]
        return self._times.add_times(events)

    def _shown(self, command: AskPages | AskLargePage) -> Event:
        if isinstance(command, AskLargePage):
            if self._page_map is None:
                return LargePage(command.large_page, self.core.step)
            return self._page_map.large_page(command.large_page)
        if self._page_map is None:
            return Pages(self._incarnation, self.core.step)
        return self._page_map.pages(self._incarnation)

    def _knows_images(self, command: Submit) -> bool:
        prompt = command.spec.token_ids
        ends = [start + tokens - 1 for start, tokens, _ in command.spec.images]
        contents = [int(prompt[end]) for end in ends if end in range(len(prompt))]
        return not contents or (self.images is not None and self.images.knows(contents))

    def wakes(self) -> int | None:
        return self.link.bell.descriptor

    def woken(self) -> list[Event]:
        events: list[Event] = []
        self.link.bell.clear()
        if self.grammars.take_masked():
            self.core.resume_held()
        for command, problem in self.grammars.take_compiled():
            events += [refusal(command, problem)] if problem else self._entered(command)
        events += self._take_entries()
        self._sent_images.release_ended(events)
        return self._times.add_times(events)

    def _take_entries(self) -> list[Event]:
        """Process entries of other instances and time, unless a step runs that may read pages."""
        if self._running:
            return []
        return [event for entry in self.link.entries() for event in self.loop.take(entry)]

    def close(self) -> None:
        """End running steps, the link to others and the grammars' processes; no step may follow."""
        if self._ahead is not None:
            self._ahead.thread.shutdown()
        self.grammars.close()
        self.link.close()

    def has_work(self) -> bool:
        return self.core.has_work

    def has_requests(self) -> bool:
        return self.core.has_requests or self.grammars.count > 0

    def step(self) -> list[Event]:
        """Plan, run and commit a step; at depth 1, commit the oldest one and plan ahead."""
        if self._behind is None:
            return self._stepped()
        self._behind.computes(True)
        events = self._stepped()
        self._behind.computes(self.core.has_work)
        if self._behind.is_done:
            self._behind = None
        return events

    def _stepped(self) -> list[Event]:
        if self.core.limits.depth:
            return self._step_ahead()
        if self._warmer is not None:
            self._take_warm(self._warmer)
        plan = self._plan()
        events = self._settled(plan, partial(self._run, plan, partial(self.runner.run, plan)))
        if self._warmer is not None and not plan.work:
            self._warmer.wait(WARMING_SECONDS)
        return events

    def _step_ahead(self) -> list[Event]:
        while self.core.may_plan and not (self._running and self.link.has_entries):
            plan = self._plan()
            self._running.append((plan, self._started(plan)))
        events = self._settled(*self._running.popleft())
        return events + self._times.add_times(self._take_entries())

    def _settled(self, plan: StepPlan, result: Callable[[], StepResult]) -> list[Event]:
        """Commit a step's result, or its failure, which affects only its requests."""
        is_timed = self.core.has_tenants
        began_seconds = self._clock.now_seconds() if is_timed else 0.0
        try:
            computed = result()
        except StepFailed as failed:
            return self._committed(self.failed_steps.contain(plan, failed))
        if plan.work:
            if self.failed_steps.in_a_row:
                self.failed_steps.on_success()
            if is_timed:
                self._pace.note(plan.num_tokens, self._clock.now_seconds() - began_seconds)
        return self._committed(computed)

    def _plan(self) -> StepPlan:
        constrained = self.core.constrained.values()
        held = undrafted = NO_REQUESTS
        if constrained:
            held = self.grammars.late_requests(constrained)
        if constrained and self.core.limits.num_speculative_tokens:
            undrafted = self.grammars.find_undrafted(constrained)
        shared_tokens = self._pace.shared_prompt_tokens if self.core.has_tenants else None
        plan = self.loop.plan(PlanAsked(held, shared_tokens, undrafted))
        if plan.admitted:
            self._times.on_admitted(plan.admitted)
        return plan

    def _started(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Let a step run on a device or on a thread; return the function that waits for it."""
        if self._ahead is None:
            assert isinstance(self.runner, StartingModelRunner)
            return self._run(plan, partial(self.runner.start, plan))
        return self._ahead.start(self.runner, plan, partial(self._run, plan))

    def _run(self, plan: StepPlan, compute: Callable[[], Ran]) -> Ran:
        if plan.slot is not None:
            return compute()
        need_bytes = 0
        if plan.work:
            need_bytes = self.activations.need_bytes(plan.num_tokens, plan.num_logits)
        if not self.arena.grant(need_bytes):
            raise RuntimeError(f"step {plan.step} needs {need_bytes} bytes of activations")
        try:
            return compute()
        finally:
            self.arena.release(need_bytes)

    def _committed(self, result: StepResult | StepFailure) -> list[Event]:
        events = self.loop.commit(result)
        self.grammars.follow(self.core.constrained.values())
        if self.objectives is not None:
            late = self.objectives.after_step(events)
            if late.ttft_late or late.tpot_late:
                self._notes_due = WINDOW_ITERATIONS + 1
            if self._notes_due:
                self._notes_due -= 1
                self.loop.note(late)
        if self.images is not None:
            self._sent_images.release_ended(events)
        return self._times.add_times(events)

    def abandon(self) -> None:
        """Drop all requests and the cache, after an exception at an unknown place in a step.

        Steps that still run are awaited.  No events are sent for the dropped requests.

        :raises RuntimeError: if this engine cannot serve any further request.
        """
        if self.link.is_linked:
            raise RuntimeError("cannot abandon: other instances read this engine's pool")
        if self._ahead is not None:
            self._ahead.settle()
        if isinstance(self.runner, StartingModelRunner):
            self.runner.settle()
        self._running.clear()
        self.arena.release(self.arena.granted_bytes)
        self.grammars.forget()
        self._times = StageTimes(self._clock)
        self.loop.note(Abandoned())

    def _take_warm(self, warmer: Warmer) -> None:
        is_done = warmer.is_done
        chunks = warmer.take()
        if chunks or is_done:
            self.loop.note(Warmed(chunks))
        if not chunks and is_done:
            self._warmer = None
