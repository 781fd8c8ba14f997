"""The engine without a model: events in, plans out, results in, events out.

A plan may lack the results of the last ``depth`` steps: at depth 0 ``plan`` and ``commit``
alternate; at depth 1 step n+1 is planned while n runs, and results are committed in order.  Memory
that a step may still touch is released only with its result (the fence): a request that is
cancelled in flight keeps its pages until then, and so does one that ended while the next step
already computes it.  Deterministic: the same inputs in the same order give the same plans.  The
journal relies on that, and the simulator runs this code.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.failing.failures import (
    StepFailure,
    end_failed,
    end_without_scores,
    end_without_token,
    end_without_vector,
    forget_text,
)
from kvell.engine.moving.carried import Come
from kvell.engine.planning.handovers import Handovers, staying_reason
from kvell.engine.planning.index_watch import IndexWatch
from kvell.engine.planning.lateness import Lateness
from kvell.engine.planning.miss_watch import MissWatch
from kvell.engine.planning.overlap import require_depth
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import (
    Cancel,
    Event,
    Finished,
    GroupStats,
    Heartbeat,
    Migrate,
    Stats,
    Stays,
    Submit,
    Tokens,
)
from kvell.engine.protocol.pages import Miss
from kvell.engine.protocol.pooling import POOLED
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.admissible import output_problem, request_problem, sampling_problem
from kvell.engine.requests.cache_roots import cache_root
from kvell.engine.requests.counting import DraftTokens, StepSizes
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.model_rules import ModelRules
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.requests.pooling import pooling_problem
from kvell.engine.requests.request import Request
from kvell.engine.requests.turns import Turn, turn_cost_tokens
from kvell.errors import ChangeSomething
from kvell.memory import Layout, MemoryCore, PoolTotals, audit
from kvell.mempool.agent import Agent
from kvell.mempool.entries import PeerEntry
from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PdCaching
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transfers.methods import StreamCosts
from kvell.vocabulary import FinishReason, RequestId, StepNumber

MOST_STEPS_PUT_OFF = 64
"""Steps in a row for which the device refuses memory before the youngest request is refused."""


@dataclass(frozen=True)
class _InFlight:
    """A step whose result is pending, and the requests of its work."""

    plan: StepPlan
    requests: list[Request]


class EngineCore:
    """Requests over one memory core; knows no clock, model or process."""

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
    ) -> None:
        """:param models: rules of each of several models; the first has these limits.
        :param swapping: over the same core; None without a CPU buffer.
        :param parking: over ``swapping``, if prompts may go ahead of decodes.
        :param misses: over the same core; None if nobody asks why prefixes missed.
        :param agent: over the same core; None if requests neither come from other instances nor go.
        :param pd_caching: which of several instances cache what.
        :param streams: what pulls cost while a step computes, which whoever runs steps must then
            tell of (``StepPlan.streams``); None: they wait for its end.
        :raises ValueError: if steps cannot be planned ahead as ``limits.depth`` says.
        """
        require_depth(
            limits, core.layout, shares_pool=memory is not None, swaps=swapping is not None
        )
        self.memory = core
        self.limits = limits
        self.step = StepNumber(0)
        own = ModelRules("", limits, eos_token_ids, core.layout)
        self._rules = {rules.name: rules for rules in models or (own,)}
        self._first = next(iter(self._rules))
        self._incarnation = incarnation
        self._scheduler = Scheduler(core, limits, memory, swapping, parking)
        self._requests: dict[RequestId, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._counts = dict.fromkeys(("prompt", "output", "queries", "hits", "preempted"), 0)
        self._draft_tokens, self._step_sizes = DraftTokens(), StepSizes()
        self._misses = misses
        self._index_watch: IndexWatch | None = None
        self.handovers: Handovers | None = None
        if agent is not None:
            self.handovers = Handovers(core, self._scheduler, agent, pd_caching, streams)
        self._rests = False
        self._finished = dict.fromkeys(("stop", "length", "cancelled", "refused"), 0)
        self.max_running = self._submitted = 0
        self.last_decoding = 0

    # ------------------------------------------------------------------- inputs

    def submit(self, command: Submit) -> list[Event]:
        """Queue a request; refuse it at once if it can never be served.

        One with output goes on like a preempted request.  It ends at once if that output is all:
        the instance before emitted the last token, and could not say any more that it had.
        """
        prompt = np.frombuffer(command.prompt, "<i4").astype(np.int32)
        output = np.frombuffer(command.output, "<i4").astype(np.int32)
        model = command.model or self._first
        events = self._superseded(command)
        if problem := self._problem(command, prompt, output, model):
            self._finished["refused"] += 1
            return [*events, _refusal(command, problem)]
        request = self._request_of(command, prompt, output, model)
        self._rests = False
        self._requests[request.request_id] = request
        if request.output:
            request.finish_reason = self._finish_reason(request, request.output[-1])
        if request.finish_reason is not None:
            return [*events, self._told(request)]
        if not self._enters_moving(request, command):
            self._scheduler.enqueue(request)
        return events

    def _enters_moving(self, request: Request, command: Submit) -> bool:
        """Whether a request first waits for what other instances say."""
        if self.handovers is None or staying_reason(request, self.memory.layout.groups):
            return False
        return self.handovers.enter(request, command)

    def migrate(self, command: Migrate) -> list[Event]:
        """Let a request go on elsewhere if it can: copied while it goes on here, then moved."""
        request = self._requests.get(command.request_id)
        if request is None or request.attempt != command.attempt:
            return []
        if self.handovers is None:
            return [Stays(command.request_id, command.attempt)]
        self.handovers.migrate(request, command.goes_to)
        self._rests = False
        return self._staying()

    def _request_of(
        self,
        command: Submit,
        prompt: npt.NDArray[np.int32],
        output: npt.NDArray[np.int32],
        model: str,
    ) -> Request:
        """The request of a command that can be served."""
        room = self._rules[model].limits.max_model_len - len(prompt)
        sampling = POOLED if command.pooling else _with_seed(command)
        number, self._submitted = self._submitted, self._submitted + 1
        max_tokens = max(1, min(sampling.max_tokens or room, room))
        cost_tokens = turn_cost_tokens(len(prompt) + len(output), max_tokens - len(output))
        return Request(
            command.request_id,
            command.attempt,
            prompt,
            sampling,
            max_tokens,
            cache_root(
                command.cache_salt,
                f"{number} {command.request_id}",
                is_scored=sampling.prompt_logprobs is not None,
                is_cached=self.handovers is None or self.handovers.pd_caching > 0,
            ),
            images=np.asarray(command.images, np.int32) if command.images else None,
            image_rows=command.images,
            output=output.tolist(),
            model=model,
            number=number,
            turn=Turn(command.priority, command.tenant, command.group, cost_tokens),
            pooling=command.pooling,
            suspect_at=len(output) if command.is_suspect else -1,
        )

    def heard(self, entry: PeerEntry) -> list[Event]:
        """Take in what other instances, copies and time bring; then :meth:`take_actions`.

        :raises RuntimeError: without an agent.
        """
        if self.handovers is None:
            raise RuntimeError("this engine has no part in a pool of several instances")
        self._rests = False
        return self._handed_over(*self.handovers.heard(entry)) + self._noticed()

    def take_actions(self) -> list[Action]:
        """What the agent wants done, in order, before the next step is planned."""
        return [] if self.handovers is None else self.handovers.take_actions()

    def _handed_over(self, moved: list[Request], came: list[Come]) -> list[Event]:
        events: list[Event] = []
        for request in moved:
            request.finish_reason = "moved"
            events += self._end(request)
        for one in came:
            events += self._arrived(one)
        return events + self._staying()

    def _staying(self) -> list[Event]:
        """Which requests do not move after all."""
        stays = [] if self.handovers is None else self.handovers.take_staying()
        return [Stays(r.request_id, r.attempt) for r in stays if r.finish_reason is None]

    def _arrived(self, come: Come) -> list[Event]:
        """A request goes on here; of two attempts the later one does."""
        command = come.command
        events = self._superseded(command)
        prompt = np.frombuffer(command.prompt, "<i4").astype(np.int32)
        output = np.append(
            np.frombuffer(command.output, "<i4"), np.asarray(come.carried.output, np.int32)
        ).astype(np.int32)
        model = command.model or self._first
        if problem := self._problem(command, prompt, output, model):
            self.memory.close(come.handle, renew=False)
            return [*events, _refusal(command, problem)]
        request = self._request_of(command, prompt, output, model)
        request.handle, request.cached_tokens = come.handle, come.carried.cached_tokens
        request.computed = request.settled = come.computed
        request.preemptions = come.carried.preemptions
        request.cache_root, request.returns_to = come.carried.root, come.carried.returns_to
        self._requests[request.request_id] = request
        self._enters_moving(request, command)
        self._scheduler.arrived.append(request)
        return events

    def _superseded(self, command: Submit) -> list[Event]:
        """End an earlier attempt; its own end is no news, since the front has given it up.

        Its cancel may have come while it was still on its way here.
        """
        old = self._requests.get(command.request_id)
        if old is None or old.attempt >= command.attempt:
            return []
        ended = self.cancel(Cancel(command.request_id, old.attempt))
        return [event for event in ended if not isinstance(event, Finished)]

    def cancel(self, command: Cancel) -> list[Event]:
        """End a request; release its pages at once, or with the result of the step in flight."""
        if self.handovers is not None:
            self.handovers.cancelled(command)
        request = self._requests.get(command.request_id)
        if request is None or request.finish_reason is not None:
            return []
        if command.spares(request.attempt):
            return []
        request.finish_reason = "cancelled"
        self._rests = False
        return [] if self._is_in_flight(request) else [*self._end(request), *self._noticed()]

    @property
    def has_requests(self) -> bool:
        """Whether any request is here that has not ended, or whose end a result is owed for."""
        return bool(self._requests or self._in_flight)

    def has_request(self, request_id: RequestId, attempt: int) -> bool:
        """Whether an attempt at a request is here and has not ended."""
        request = self._requests.get(request_id)
        return request is not None and request.attempt == attempt

    def watch_index(self, make: Callable[[], IndexWatch]) -> list[Event]:
        """Tell from now on what the prefix index names and drops; all of it, if that is done
        already.

        :param make: a watch over the same core, which is used if there is none.
        """
        if self._index_watch is not None:
            return [*self._noticed(), self._index_watch.whole()]
        self._index_watch = make()
        if self.handovers is not None:
            self.handovers.watch_insertions(self._index_watch.computes)
        return []

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or any result is pending."""
        return bool(self._in_flight) or (self._has_steps and not self._rests)

    @property
    def _has_steps(self) -> bool:
        """Whether any request needs a step."""
        idle = 0 if self.handovers is None else self.handovers.num_idle
        return len(self._requests) > idle

    # -------------------------------------------------------------- plan, commit

    @property
    def may_plan(self) -> bool:
        """Whether the next step may be planned before another result is committed."""
        if not self._in_flight:
            return self._has_steps and not self._rests
        return len(self._in_flight) <= self.limits.depth and self._scheduler.may_plan_ahead

    def plan(self) -> StepPlan:
        """Plan the next step; at most ``limits.depth`` results may be pending.

        :meth:`take_actions` before it runs.

        :raises RuntimeError: if more are.
        """
        if len(self._in_flight) > self.limits.depth:
            raise RuntimeError(f"the result of step {self._in_flight[0].plan.step} is owed")
        self.step = StepNumber(self.step + 1)
        plan = self._scheduler.plan(self.step, len(self._in_flight))
        self._count(plan)
        requests = [self._requests[work.request_id] for work in plan.work]
        for work, request in zip(plan.work, requests, strict=True):
            request.begin(work.start + work.known, work.samples)
            if self._index_watch is not None:
                self._index_watch.computes(work.handle, request)
        if self.handovers is not None and not self._in_flight:
            streams = self.handovers.planned(plan, requests)
            plan = replace(plan, streams=streams) if streams else plan
        self._in_flight.append(_InFlight(plan, requests))
        return plan

    def commit(self, result: StepResult) -> list[Event]:
        """Commit a step's tokens: publish what it computed, finish requests that are done.

        :raises ValueError: if the result is not that of the oldest plan in flight.
        """
        self._require_oldest(result.step)
        yields = _yields(self._in_flight[0].plan, result)
        step = self._in_flight.popleft()
        events = self._scored(step, result) if result.scored else []
        if result.pooled:
            _take_vectors(step, result)
        taken = self._take_tokens(step.plan, step.requests, yields)
        events += _with_logprobs(taken, step, result) if result.logprobs else taken
        for request in step.requests:
            if request.finish_reason is not None:
                events += self._end(request)
        if self.handovers is not None:
            events += self._handed_over(*self.handovers.computed(step.requests))
            self._rests = _is_empty(step.plan) and self.handovers.holds_pages
        if self._scheduler.steps_put_off >= MOST_STEPS_PUT_OFF and self._scheduler.running:
            events.append(self._refuse_youngest())
        return events + self._noticed() if self._index_watch is not None else events

    def fail(self, failure: StepFailure) -> list[Event]:
        """Take in that the oldest step in flight failed: its requests end, nothing is published.

        Its copies of pages are made all the same, so all else that it planned holds.

        :raises ValueError: if it is not the oldest plan in flight.
        """
        self._require_oldest(failure.step)
        step = self._in_flight.popleft()
        for work, request in zip(step.plan.work, step.requests, strict=True):
            request.settle(request.settled, work.samples)
        end_failed(step.requests, failure)
        events = [event for request in step.requests for event in self._end(request)]
        return events + self._noticed()

    def _require_oldest(self, step: StepNumber) -> None:
        if not self._in_flight or self._in_flight[0].plan.step != step:
            raise ValueError(f"a result of step {step} was not asked for")

    def _noticed(self) -> list[Event]:
        """What the index came to name, and names no longer, if somebody watches it."""
        if self._index_watch is None:
            return []
        in_flight = {work.handle for step in self._in_flight for work in step.plan.work}
        running = (request.handle for request in self._scheduler.running)
        notice = self._index_watch.notice(in_flight.union(running))
        return [] if notice is None else [notice]

    def _scored(self, step: _InFlight, result: StepResult) -> list[Event]:
        """How likely prompts were; positions told before a preemption are not told again."""
        events: list[Event] = []
        for work, request in zip(step.plan.work, step.requests, strict=True):
            scores = result.scored.get(work.handle)
            if scores is None or request.finish_reason is not None:
                continue
            if not scores:
                end_without_scores(request)
            first = max(work.start + 1, request.scored)
            fresh = scores[first - work.start - 1 :]
            if fresh:
                request.scored = first + len(fresh)
                told = PromptLogprobs(request.request_id, request.attempt, first, fresh)
                events.append(told)
        return events

    def _refuse_youngest(self) -> Event:
        """Refuse the youngest request, since the device refuses memory step after step."""
        youngest = self._scheduler.running[-1]
        youngest.finish_reason = "refused"
        self._scheduler.steps_put_off = 0
        (finished,) = self._end(youngest)
        assert isinstance(finished, Finished)
        why = f"the device refused memory for {MOST_STEPS_PUT_OFF} steps in a row"
        return replace(finished, message=why, try_later=True)

    def note(self, late: Lateness) -> None:
        """Take in whether requests were late in the last step, from the caller's clock."""
        parking = self._scheduler.parking
        if parking is not None:
            parking.sizes.note_iteration(ttft_late=late.ttft_late, tpot_late=late.tpot_late)

    def warm(self, chunks: int) -> None:
        """Note that the next ``chunks`` chunks of the pool have memory; 0: no more will."""
        self.step_memory.warm(chunks)

    def _take_tokens(
        self, plan: StepPlan, requests: list[Request], yields: list[tuple[int, ...]]
    ) -> list[Event]:
        """Append each work's tokens to its request; advance and publish what is computed.

        Accepted draft tokens are computed already, except in models with states; the last token
        of each work is not.
        """
        events: list[Event] = []
        draft_tokens: list[tuple[int, int]] = []
        newest: list[tuple[int, int]] = []
        for work, request, tokens in zip(plan.work, requests, yields, strict=True):
            if len(tokens) == 1 and not work.proposed:  # the common case
                if request.finish_reason is None and tokens[0] < 0:
                    end_without_token(request, tokens[0])
                elif request.finish_reason is None:
                    events.append(self._take_token(request, tokens[0]))
                newest.append((work.handle, tokens[0]))
                request.repeats = 0
                request.settle(work.start + work.count, True)
                continue
            self._draft_tokens.add(work.proposed, len(tokens) - 1)
            taken = self._take_yield(request, tokens)
            events.extend(taken)
            kept = tokens[: len(taken)] or tokens  # a cancelled request takes none
            right = max(0, len(kept) - 1)
            request.repeats = right if self._rules[request.model].has_states else 0
            right -= request.repeats
            draft_tokens.extend((work.handle, token) for token in kept[:right])
            newest.extend((work.handle, token) for token in kept[right:])
            request.settle(work.start + work.known + right, work.samples)
        handles = [work.handle for work in plan.work]
        settled = [request.settled for request in requests]
        if any(request.is_spoiled for request in requests):  # nothing of these is published
            keeps = [not request.is_spoiled for request in requests]
            handles, settled = list(compress(handles, keeps)), list(compress(settled, keeps))
            draft_tokens = [one for one in draft_tokens if one[0] in handles]
            newest = [one for one in newest if one[0] in handles]
        self._append(draft_tokens)
        self.memory.advance(np.array(handles, np.int32), np.array(settled, np.int32))
        self._append(newest)
        return events

    def _append(self, tokens: list[tuple[int, int]]) -> None:
        if not tokens:
            return
        handles, ids = zip(*tokens, strict=True)
        self.memory.append(np.array(handles, np.int32), np.array(ids, np.int32))

    def _take_yield(self, request: Request, tokens: tuple[int, ...]) -> list[Event]:
        """Take the tokens one by one, up to where the request ends."""
        events: list[Event] = []
        for token in tokens:
            if request.finish_reason is None and token < 0:
                end_without_token(request, token)
            elif request.finish_reason is None:
                events.append(self._take_token(request, token))
        return events

    def _take_token(self, request: Request, token: int) -> Event:
        index = len(request.output)
        request.output.append(token)
        self._counts["output"] += 1
        request.finish_reason = self._finish_reason(request, token)
        return Tokens(request.request_id, request.attempt, index, (token,))

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        sampling = request.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        if not sampling.ignore_eos and token in self._rules[request.model].eos_token_ids:
            return "stop"
        return "length" if len(request.output) >= request.max_tokens else None

    def _end(self, request: Request) -> list[Event]:
        """Report the end once; release pages unless a step in flight may touch them."""
        is_told = self._requests.get(request.request_id) is not request
        if self.handovers is not None:
            self.handovers.ended(request)
        if not self._is_in_flight(request):
            self._scheduler.finish(request)
            if request.is_spoiled and not request.step_failed:
                forget_text(self.memory, request)
            if self.handovers is not None and not is_told:
                self.handovers.send_back(request)
        if self._misses is not None and not is_told and self._scheduler.looks_up(request):
            self._misses.ended(request, self.step)
        return [] if is_told else [self._told(request)]

    def _told(self, request: Request) -> Finished:
        del self._requests[request.request_id]
        reason = request.finish_reason or "error"
        self._finished[reason] = self._finished.get(reason, 0) + 1
        return Finished(
            request.request_id,
            request.attempt,
            reason,
            len(request.prompt),
            len(request.output),
            min(request.cached_tokens or 0, len(request.prompt)),
            request.preemptions,
            message=request.problem,
            step_failed=request.step_failed,
            embedding=request.embedding,
        )

    # ------------------------------------------------------------------ checking

    def rules(self, model: str = "") -> ModelRules:
        """The rules of a model; "" is the first.

        :raises ChangeSomething: if no model has that name.
        """
        rules = self._rules.get(model or self._first)
        if rules is None:
            served = ", ".join(filter(None, self._rules))
            remedy = f"use {served}" if served else "leave it out: there is one model"
            raise ChangeSomething("model", model[:200], "is not served", remedy)
        return rules

    def _problem(
        self,
        command: Submit,
        prompt: npt.NDArray[np.int32],
        output: npt.NDArray[np.int32],
        model: str,
    ) -> ChangeSomething | None:
        if command.request_id in self._requests:
            return ChangeSomething("request_id", command.request_id, "is in use", "choose another")
        try:
            rules = self.rules(model)
        except ChangeSomething as problem:
            return problem
        if command.pooling:
            return pooling_problem(prompt, rules.limits, has_images=bool(command.images))
        asked = command.sampling.max_tokens or 1
        return (
            sampling_problem(command.sampling, rules.limits, bool(command.images))
            or request_problem(prompt, command.images, asked, rules.limits, rules.layout)
            or output_problem(output, rules.limits)
        )

    def _is_in_flight(self, request: Request) -> bool:
        return any(request is one for step in self._in_flight for one in step.requests)

    def let_go(self) -> None:
        """Give up all protected prefixes, which become plain cache, and those in the CPU buffer."""
        self._scheduler.protected.yield_all()
        if self._scheduler.swapping is not None:
            self._scheduler.swapping.let_go()

    # ------------------------------------------------------------------- counting

    @property
    def step_memory(self) -> StepMemory:
        """How much a step may compute."""
        return self._scheduler.memory

    def _count(self, plan: StepPlan) -> None:
        self._counts["preempted"] += len(plan.preempted)
        self._step_sizes.add(plan.num_tokens)
        self.max_running = max(self.max_running, self._scheduler.num_wanting)
        self.last_decoding = self.num_decoding()
        for request_id in plan.admitted:
            request = self._requests[request_id]
            if request.preemptions or request.output:
                continue
            self._counts["prompt"] += len(request.prompt)
            self._counts["queries"] += len(request.prompt)
            self._counts["hits"] += request.cached_tokens or 0
            if self._misses is not None and self._scheduler.looks_up(request):
                self._misses.admitted(request, self.step, self._scheduler.running)

    def _buffer_figures(self) -> dict[str, int]:
        swapping, parking = self._scheduler.swapping, self._scheduler.parking
        if swapping is None:
            return {}
        if parking is None:
            return swapping.figures()
        return swapping.figures() | {
            "parked": len(parking.parked),
            "parkings": parking.count,
            "logical_large_pages": parking.sizes.logical_chunks,
        }

    def num_decoding(self) -> int:
        """Running requests whose whole prompt is computed."""
        return sum(1 for request in self._scheduler.running if request.is_decoding)

    def num_waiting(self) -> int:
        """Requests that hold no pages: queued or parked."""
        parking = self._scheduler.parking
        return len(self._scheduler.waiting) + (len(parking.parked) if parking else 0)

    def num_queued(self) -> int:
        """Requests in the waiting queue; parked ones are not in it."""
        return len(self._scheduler.waiting)

    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._scheduler.running)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold pages."""
        return self._scheduler.running

    @property
    def latest_misses(self) -> tuple[Miss, ...]:
        """Requests of which a part of the prompt was not found, the oldest first."""
        return () if self._misses is None else self._misses.latest

    def pulse(self) -> Heartbeat:
        """What there is now; it costs as much as counting the pool, so it is not for every step."""
        totals, layout = self.memory.totals(), self.memory.layout
        return Heartbeat(
            incarnation=self._incarnation,
            step=self.step,
            running=self.num_running(),
            waiting=self.num_waiting(),
            large_pages=layout.num_large_pages,
            empty_large_pages=totals.empty_large,
            free_bytes=layout.pool_bytes - _used_bytes(totals, layout),
            pool_bytes=layout.pool_bytes,
        )

    def audit(self) -> tuple[str, ...]:
        """Everything that contradicts itself in pages, tables and index; linear in the pool."""
        return tuple(audit(self.memory.layout, self.memory.snapshot()))

    def stats(self) -> Stats:
        """Gauges now and counters so far."""
        totals, layout = self.memory.totals(), self.memory.layout
        swapping, parking = self._scheduler.swapping, self._scheduler.parking
        return Stats(
            incarnation=self._incarnation,
            step=self.step,
            running=self.num_running(),
            waiting=self.num_waiting(),
            large_pages=layout.num_large_pages,
            empty_large_pages=totals.empty_large,
            kv_cache_usage=_used_bytes(totals, layout) / layout.pool_bytes,
            prompt_tokens=self._counts["prompt"],
            output_tokens=self._counts["output"],
            prefix_cache_queries=self._counts["queries"],
            prefix_cache_hits=self._counts["hits"],
            preemptions=self._counts["preempted"],
            finished=dict(self._finished),
            rungs={
                **totals.rungs,
                **self._scheduler.rungs,
                **self.step_memory.rungs,
                **(swapping.counters() if swapping else {}),
                **({"offload": parking.count} if parking else {}),
                "refuse": self._finished["refused"],
            },
            protected_prefixes=self._scheduler.protected.prefixes,
            protected_tokens=self._scheduler.protected.tokens,
            spec_decode_drafts=self._draft_tokens.drafts,
            spec_decode_draft_tokens=self._draft_tokens.draft_tokens,
            spec_decode_accepted_tokens=self._draft_tokens.accepted_tokens,
            spec_decode_accepted_by_position=self._draft_tokens.accepted_by_position(),
            step_tokens=self._step_sizes.tokens,
            steps_by_size=self._step_sizes.by_size(),
            large_page_bytes=layout.large_page_bytes,
            groups=_group_stats(totals, layout),
            memory=self.step_memory.figures(),
            buffer=self._buffer_figures(),
            misses={} if self._misses is None else self._misses.counts,
        )


def _used_bytes(totals: PoolTotals, layout: Layout) -> int:
    """Bytes of the small pages that requests use."""
    return sum(
        count * group.page_stride_bytes
        for count, group in zip(totals.used_pages, layout.groups, strict=True)
    )


def _group_stats(totals: PoolTotals, layout: Layout) -> tuple[GroupStats, ...]:
    """Pages and sizes of each group."""
    return tuple(
        GroupStats(
            group.name,
            totals.used_pages[index],
            totals.cached_pages[index],
            totals.evicted_pages[index],
            totals.group_hit_tokens[index],
            totals.unwritten_pages[index],
            totals.stranded_pages[index],
            totals.checkpoint_pages[index],
            group.pages_per_large * layout.num_large_pages,
            group.page_tokens,
            group.page_stride_bytes,
        )
        for index, group in enumerate(layout.groups)
    )


def _with_logprobs(events: list[Event], step: _InFlight, result: StepResult) -> list[Event]:
    """The events, with how likely their tokens are where that was asked."""
    asked = {
        request.request_id: result.logprobs[work.handle]
        for work, request in zip(step.plan.work, step.requests, strict=True)
        if work.handle in result.logprobs
    }
    return [
        structs.replace(event, logprobs=(asked[event.request_id],))
        if isinstance(event, Tokens) and event.request_id in asked
        else event
        for event in events
    ]


def _is_empty(plan: StepPlan) -> bool:
    """Whether the next plan would be the same, unless something happens."""
    return not (plan.work or plan.preempted or plan.released)


def _take_vectors(step: _InFlight, result: StepResult) -> None:
    """End requests that have their prompt's vector; the token drawn beside it is not taken."""
    for work, request in zip(step.plan.work, step.requests, strict=True):
        if work.handle in result.pooled and request.finish_reason is None:
            request.embedding = result.pooled[work.handle]
            request.finish_reason = "stop"
            if not request.embedding:
                end_without_vector(request)


def _yields(plan: StepPlan, result: StepResult) -> list[tuple[int, ...]]:
    """The tokens that each work of the plan yields; none for a prefill that is not done."""
    is_even = not result.counts and len(result.token_ids) == len(plan.work) == plan.num_logits
    if is_even and all(work.samples for work in plan.work):  # each yields one token
        return [(token,) for token in result.token_ids]
    yields = iter(result.by_work())
    most = [work.num_draws for work in plan.work]
    found = [next(yields, ()) if count else () for count in most]
    fits = all(min(1, count) <= len(f) <= count for f, count in zip(found, most, strict=True))
    if not fits or any(yields):
        raise ValueError(f"the tokens of step {result.step} are not those of its work")
    return found


def _refusal(command: Submit, problem: ChangeSomething) -> Finished:
    return Finished(
        command.request_id,
        command.attempt,
        "refused",
        len(command.prompt) // 4,
        message=str(problem),
        field=problem.field,
    )


def _with_seed(command: Submit) -> SamplingParams:
    """The sampling with a seed; where none is given, one made of the request id, for replays."""
    if command.sampling.seed is not None or command.sampling.temperature == 0:
        return command.sampling
    digest = hashlib.blake2b(command.request_id.encode(), digest_size=7).digest()
    return replace(command.sampling, seed=int.from_bytes(digest, "little"))
