"""The engine without a model: it takes commands and results, and returns plans and events.

A plan may lack the results of the last ``depth`` steps.  At depth 0, ``plan`` and ``commit``
alternate; at depth 1, step n+1 is planned while step n runs.  Results are committed in order.
Memory that a step may still touch is released only with its result (the fence): a request that is
cancelled in flight keeps its pages until then, and so does a request that ended while the next
step already computes it.  The same inputs in the same order give the same plans: the journal
relies on this, and the simulator runs this code.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvell.engine.core.engine_stats import EngineStats
from kvell.engine.core.entering import RequestFactory
from kvell.engine.core.index_watch import IndexWatch
from kvell.engine.core.lateness import Lateness
from kvell.engine.core.miss_watch import MissWatch
from kvell.engine.core.yields import StepCommitter, StepInFlight, StepsInFlight, end_of, yields_of
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.failing.failures import StepFailure, end_failed, forget_text
from kvell.engine.lending.borrowing_requests import NO_ROWS
from kvell.engine.lending.placement import GIVES_WAY, NOBODY_LENDS
from kvell.engine.moving.encoding import ArrivedRequest
from kvell.engine.moving.handovers import Handovers
from kvell.engine.moving.pool_part import PoolNews, PoolPart
from kvell.engine.planning.scheduler import MOST_DEPTH, Scheduler
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.protocol.messages import (
    Cancel,
    Event,
    Finished,
    Migrate,
    MoveKvCache,
    Submit,
    Tokens,
)
from kvell.engine.protocol.pages import Miss
from kvell.engine.protocol.statistics import Stats
from kvell.engine.requests.limits import Limits, ModelRules
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.requests.request import Request
from kvell.memory import MemoryCore, audit
from kvell.mempool.agent import Agent
from kvell.mempool.entries import PeerEntry
from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PdCaching
from kvell.mempool.transfers.methods import StreamCosts
from kvell.vocabulary import RequestId, StepNumber

NO_TEXT_ROOT = "\0nothing"
"""Cache root of a holder that only evicts pages; nothing is ever cached under it."""


def evict_unused(memory: MemoryCore, step: StepNumber) -> None:
    model = memory.layout.groups[0].model
    no_text = np.zeros(1, np.int32)
    handle = memory.open(no_text, NO_TEXT_ROOT, step, reuse=False, model=model)
    memory.close(handle, renew=False)


MOST_STEPS_PUT_OFF = 64
"""Number of consecutive steps without device memory after which the youngest request is refused."""


class EngineCore:
    """The requests over one memory core, without clock, model or process."""

    def __init__(
        self,
        core: MemoryCore,
        limits: Limits,
        eos_token_ids: frozenset[int],
        incarnation: int = 0,
        models: Sequence[ModelRules] = (),
        memory: StepMemory | None = None,
        swapping: Swapping | None = None,
        parking: Parking | None = None,
        misses: MissWatch | None = None,
        agent: Agent | None = None,
        pd_caching: PdCaching = DEFAULT_PD_CACHING,
        streams: StreamCosts | None = None,
        buffer_large: int | None = None,
    ) -> None:
        """:param models: rules of each of several models; the first has ``limits``.
        :param misses: over the same core; None: reasons of prefix misses are not recorded.
        :param agent: over the same core; None if requests do not move between instances.
        :param streams: cost of pulls during a step, for which the runner must report the progress
            of steps (``StepPlan.streams``); None: pulls wait for the end of the step.
        :param buffer_large: number of the CPU buffer's first large page, counted from the pool's
            first, if a pass can write there; None: it cannot.
        :raises ValueError: if steps cannot be planned as far ahead as ``limits.depth``.
        """
        if not 0 <= limits.depth <= MOST_DEPTH:
            problem = f"depth={limits.depth}: steps are planned 0 or {MOST_DEPTH} ahead"
            raise ValueError(problem)
        self.memory = core
        self.limits = limits
        self.step = StepNumber(0)
        single = ModelRules("", limits, eos_token_ids, core.layout)
        rules = {model.name: model for model in models or (single,)}
        self.scheduler = Scheduler(core, limits, memory, swapping, parking, buffer_large)
        self.requests: dict[RequestId, Request] = {}
        self.constrained: dict[RequestId, Request] = {}
        self._in_flight = StepsInFlight()
        self._misses = misses
        self._index_watch: IndexWatch | None = None
        self.pool = PoolPart()
        if agent is not None:
            lengths = {name: model.limits.max_model_len for name, model in rules.items()}
            self.pool = Handovers(self.scheduler, agent, lengths, pd_caching, streams)
        self.entrance = RequestFactory(rules, is_cached=agent is None or pd_caching > 0)
        self.counters = EngineStats(incarnation, core, self.scheduler, misses, self.pool)
        self._yields = StepCommitter(core, rules, self.counters)
        self._is_idle = self._holds = self.has_tenants = False
        self.max_running = 0

    # ------------------------------------------------------------------- inputs

    def submit(self, command: Submit) -> list[Event]:
        """Queue a request; refuse it immediately if it can never be served.

        A request with output continues like a preempted one, or ends if that output is complete.
        """
        events = self._superseded(command)
        request = self.entrance.make(command, self.requests)
        if isinstance(request, Finished):
            self.counters.count_end("refused")
            return [*events, request]
        self._is_idle = False
        self._add(request)
        if request.output:
            request.finish_reason = self._yields.finish_reason(request, request.output[-1])
        if request.finish_reason is not None:
            return [*events, self._told(request)]
        if not self.pool.enter(request, command):
            self.scheduler.seats.waiting.add(request)
        return events

    def migrate(self, command: Migrate) -> list[Event]:
        if not self.has_request(command.request_id, command.attempt):
            return []
        request = self.requests[command.request_id]
        self.pool.begin_migration(request, command.goes_to, rests=not self._in_flight)
        self._is_idle = False
        return self.pool.take_staying()

    def move_kvcache(self, command: MoveKvCache) -> list[Event]:
        """Move sections of a request's pages to a creditor (Infinite-LLM §6.2)."""
        if self.has_request(command.request_id, command.attempt):
            self._is_idle = False
            request = self.requests[command.request_id]
            self.pool.move_kvcache(request, command.num_blocks, command.dst)
        return []

    def on_entry(self, entry: PeerEntry) -> list[Event]:
        """Process an entry of other instances, copies or time; then take the pool's actions."""
        news = self.pool.on_entry(entry, is_owed_a_result=bool(self._in_flight))
        self._is_idle = False
        return self._handed_over(news) + self._noticed()

    def _handed_over(self, news: PoolNews) -> list[Event]:
        events: list[Event] = []
        for request in news.moved:
            request.finish_reason = "moved"
            events += self._end(request)
        for arrived in news.arrived:
            events += self._arrived(arrived)
        borrowed = self.pool.borrowed
        for request, why in () if borrowed is None else borrowed.placed.take_given_up():
            said = GIVES_WAY if why else NOBODY_LENDS
            events += [replace(self._refuse(request, said), not_taken=why)]
        return events + self.pool.take_staying()

    def _arrived(self, arrived: ArrivedRequest) -> list[Event]:
        """Enter a request that arrived from another instance; it replaces an earlier attempt."""
        events = self._superseded(arrived.command)
        request = self.entrance.make_arrived(arrived, self.requests)
        if isinstance(request, Finished):
            self.memory.close(arrived.handle, renew=False)
            return [*events, request]
        self._add(request)
        self.pool.enter(request, arrived.command)
        self.scheduler.seats.waiting.count_served(request)
        self.scheduler.seats.arrived.append(request)
        return events

    def _superseded(self, command: Submit) -> list[Event]:
        """Cancel an older attempt without reporting it: the front has already given it up.

        The front's cancel may have arrived while the request was still moving to this instance.
        """
        old = self.requests.get(command.request_id)
        if old is None or old.attempt >= command.attempt:
            return []
        ended = self.cancel(Cancel(command.request_id, old.attempt))
        return [event for event in ended if not isinstance(event, Finished)]

    def cancel(self, command: Cancel) -> list[Event]:
        """End a request; release its pages now, or with the result of the step in flight."""
        self._is_idle = False  # pages may become free that were held for the request's arrival
        self.pool.on_cancelled(command)
        request = self.requests.get(command.request_id)
        if request is None or request.finish_reason or command.spares(request.attempt):
            return []
        request.finish_reason = "cancelled"
        return [] if self._in_flight.has(request) else [*self._end(request), *self._noticed()]

    @property
    def has_requests(self) -> bool:
        return bool(self.requests or self._in_flight)

    def has_request(self, request_id: RequestId, attempt: int) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.attempt == attempt

    def watch_index(self, make: Callable[[], IndexWatch]) -> list[Event]:
        """Report the blocks that the prefix index inserts and drops from now on.

        :param make: makes a watch over this core.  If there is a watch, it reports the whole index.
        """
        if self._index_watch is not None:
            return [*self._noticed(), self._index_watch.whole()]
        self._index_watch = make()
        self.pool.watch_insertions(self._index_watch.computes)
        return []

    @property
    def has_work(self) -> bool:
        if self._in_flight:
            return True
        return not self._is_idle and len(self.requests) > self.pool.num_idle

    # -------------------------------------------------------------- plan, commit

    @property
    def may_plan(self) -> bool:
        if not self._in_flight:
            return self.has_work
        is_ahead = len(self._in_flight) <= self.limits.depth and self.scheduler.may_plan_ahead
        return is_ahead and not self.pool.wants_fence

    def _add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.has_tenants = self.has_tenants or bool(request.turn.tenant)
        if request.sampling.structured_outputs is not None:
            self.constrained[request.request_id] = request

    def resume_held(self) -> None:
        self._is_idle = self._holds = False

    def plan(
        self,
        held: frozenset[RequestId] = frozenset(),
        shared_prompt_tokens: int | None = None,
        undrafted: frozenset[RequestId] = frozenset(),
    ) -> StepPlan:
        """Plan the next step; take the pool's actions before it runs.

        :param held: requests that have no part in it, until :meth:`resume_held`; they keep their
            pages.
        :param shared_prompt_tokens: its most prompt tokens if several tenants have requests
            (:mod:`.pace`); None: no bound.
        :raises RuntimeError: if more than ``limits.depth`` results are pending.
        """
        if len(self._in_flight) > self.limits.depth:
            raise RuntimeError(f"the result of step {self._in_flight[0].plan.step} is missing")
        self.step = StepNumber(self.step + 1)
        is_quiet = self.pool.is_quiet
        # A request that begins to borrow while the step runs needs the time of the step's begin.
        is_timed = self.limits.depth > 0 or not is_quiet
        borrowed = self.pool.borrowed if is_timed else None
        away = NO_ROWS if borrowed is None else borrowed.before_plan(self.step)
        plan = self.scheduler.plan(
            self.step, len(self._in_flight), held, shared_prompt_tokens, undrafted
        )
        self._holds = bool(held)
        if not is_quiet:
            plan = self.pool.plan_borrows(plan, away)
        self.counters.count_plan(plan, self.requests)
        self.max_running = max(self.max_running, self.scheduler.seats.num_wanting)
        requests = [self.requests[work.spec.request_id] for work in plan.work]
        for work, request in zip(plan.work, requests, strict=True):
            request.begin(work.start + work.count - work.proposed, work.samples)
            if self._index_watch is not None:
                self._index_watch.computes(
                    work.handle, request.model, request.cache_root, request.tokens
                )
        if not is_quiet and not self._in_flight:
            streams = self.pool.on_planned(plan, requests)
            plan = replace(plan, streams=streams) if streams else plan
        self._in_flight.append(StepInFlight(plan, requests))
        return plan

    def commit(self, result: StepResult) -> list[Event]:
        """Commit a step's tokens: publish what it computed, finish requests that are done.

        :raises ValueError: if the result is not that of the oldest plan in flight.
        """
        step = self._in_flight.require(result.step)
        tokens = yields_of(step.plan, result)
        self._in_flight.popleft()
        events = self._yields.take(step, result, tokens)
        for event in events:
            if isinstance(event, Tokens):
                self.scheduler.seats.waiting.charge(event.request_id, len(event.token_ids))
        if result.missed:
            self.pool.on_missed(result.missed)
        for request in step.requests:
            if request.finish_reason is not None:
                events += self._end(request)
        is_quiet = self.pool.is_quiet
        if not is_quiet:
            rests = not self._in_flight
            news = self.pool.on_computed(result.step, step.requests, rests=rests)
            events += self._handed_over(news)
        may_rest = self._holds or (not is_quiet and self.pool.holds_pages)
        self._is_idle = may_rest and step.plan.is_idle
        if self.scheduler.steps_put_off >= MOST_STEPS_PUT_OFF:
            seats = self.scheduler.seats
            self.scheduler.steps_put_off = 0
            why = f"the device refused memory for {MOST_STEPS_PUT_OFF} steps in a row"
            events += [
                self._refuse(put_off, why) for put_off in (seats.running or seats.offloaded)[-1:]
            ]
        return events + self._noticed() if self._index_watch is not None else events

    def fail(self, failure: StepFailure) -> list[Event]:
        """End the requests of the oldest step in flight, which failed after its copies of pages.

        :raises ValueError: if it is not the oldest plan in flight.
        """
        step = self._in_flight.require(failure.step)
        self._in_flight.popleft()
        for work, request in zip(step.plan.work, step.requests, strict=True):
            request.settle(request.settled, work.samples)
        end_failed(step.requests, failure)
        events = [event for request in step.requests for event in self._end(request)]
        return events + self._noticed()

    def _noticed(self) -> list[Event]:
        if self._index_watch is None:
            return []
        running = (request.handle for request in self.scheduler.seats.running)
        notice = self._index_watch.notice(self._in_flight.handles.union(running))
        return [] if notice is None else [notice]

    def _refuse(self, request: Request, why: str) -> Finished:
        request.finish_reason = "refused"
        (finished,) = self._end(request)
        assert isinstance(finished, Finished)
        return replace(finished, message=why, try_later=True)

    def note(self, late: Lateness) -> None:
        if self.scheduler.parking is not None:
            sizes = self.scheduler.parking.sizes
            sizes.note_iteration(ttft_late=late.ttft_late, tpot_late=late.tpot_late)

    def _end(self, request: Request) -> list[Event]:
        """Report the end once; release pages unless a step in flight may touch them."""
        is_reported = self.requests.get(request.request_id) is not request
        self.pool.on_ended(request)
        if not self._in_flight.has(request):
            self.scheduler.finish(request)
            if request.is_spoiled and not request.step_failed:
                forget_text(self.memory, request)
            if not is_reported:
                self.pool.send_back(request)
        if self._misses is not None and not is_reported and self.scheduler.looks_up(request):
            self._misses.on_ended(request, self.step)
        return [] if is_reported else [self._told(request)]

    def _told(self, request: Request) -> Finished:
        del self.requests[request.request_id]
        self.constrained.pop(request.request_id, None)
        is_known = request.cached_tokens is not None
        end = end_of(request, self.scheduler.cached_prompt_tokens(request) if is_known else 0)
        self.counters.count_end(end.reason)
        return end

    def forget_prefixes(self) -> list[Event]:
        """Evict all cached pages, also in the CPU buffer; pages that requests use stay."""
        self.scheduler.drop_reserves()
        evict_unused(self.memory, self.step)
        return self._noticed()

    def abandon(self) -> None:
        """Drop all requests and the cache, in whatever state an exception has left them.

        The pool's contents are not trusted: a step may have been interrupted before it copied or
        computed what its plan says.  The runner may not have seen the plans in flight.

        :raises RuntimeError: if the audit finds a problem afterwards.
        """
        self.requests.clear()
        self.constrained.clear()
        released = [handle for step in self._in_flight for handle in step.plan.released]
        self._in_flight.clear()
        self.scheduler.drop_reserves()
        held = [holder.handle for holder in self.memory.snapshot().holders]
        for handle in held:
            self.memory.close(handle, renew=False)
        self.scheduler.clear((*released, *held))
        evict_unused(self.memory, self.step)
        if problems := self.audit():
            raise RuntimeError(problems[0])

    @property
    def step_memory(self) -> StepMemory:
        return self.scheduler.chunks.memory

    @property
    def running(self) -> Sequence[Request]:
        return self.scheduler.seats.running

    @property
    def latest_misses(self) -> tuple[Miss, ...]:
        return () if self._misses is None else self._misses.log.latest

    def audit(self) -> tuple[str, ...]:
        """Return all contradictions of pages, tables and index, in time linear in the pool."""
        return tuple(audit(self.memory.layout, self.memory.snapshot()))

    def stats(self) -> Stats:
        return self.counters.stats(self.step)
