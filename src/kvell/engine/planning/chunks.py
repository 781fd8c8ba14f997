"""Work of a step for running requests: decodes, prefill chunks, draft tokens; pure.

The memory core and the owner of activation memory decide how much of it fits.
"""

from collections.abc import Collection, Iterable

import numpy as np

from kvell.engine.planning.plan_draft import PlanDraft
from kvell.engine.planning.protected import ProtectedPrefixes
from kvell.engine.planning.seats import RequestQueues
from kvell.engine.planning.speculation import Speculation
from kvell.engine.planning.step_memory import RigidMemory, StepMemory
from kvell.engine.planning.whole_prompts import has_budget, least_end
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import NewPages
from kvell.engine.requests.request import Request, RequestState
from kvell.memory import GroupKind, MemoryCore
from kvell.vocabulary import RequestId, StepNumber

RECENT_STEPS = 256
"""Steps after its last answer in which a tenant counts as one whose requests wait."""
LEAST_PART_TOKENS = 16
"""The fewest prompt tokens of a tenant in a step."""


class Chunks:
    """The planner of work for the requests that have seats.

    :param memory: None if activations have their own reserve.
    :ivar protected: prefixes that are given up before a request is preempted or deferred.
    :ivar must_settle: whether planning must wait for the results of steps in flight.
    """

    def __init__(
        self, core: MemoryCore, limits: Limits, seats: RequestQueues, memory: StepMemory | None
    ) -> None:
        self.memory: StepMemory = memory or RigidMemory(core)
        self.protected = ProtectedPrefixes(core, limits)
        self.must_settle = False
        self._shared_prompt_tokens: int | None = None
        self._tenants: tuple[frozenset[str], frozenset[str]] | None = None
        self._answered: dict[str, StepNumber] = {}
        self._step = StepNumber(0)
        self._core, self._limits, self._seats = core, limits, seats
        self._may_cut = limits.enable_chunked_prefill and not limits.whole_images
        self._has_states = any(g.kind is GroupKind.STATE for g in core.layout.groups)
        dropping = (g for g in core.layout.groups if g.kind is GroupKind.DROPPING)
        self._budget_tokens = min((group.window_tokens for group in dropping), default=None)
        self._speculation = Speculation(core, limits)

    def begin_step(self, step: StepNumber, shared_prompt_tokens: int | None) -> None:
        """Begin to plan a step.

        :param shared_prompt_tokens: most prompt tokens of the step if several tenants have
            requests, in equal parts, where prompts may be cut at any token; None: no bound.
        """
        self.must_settle = False
        self._step = step
        self._shared_prompt_tokens = shared_prompt_tokens if self._may_cut else None
        self._tenants = None

    def note_answered(self, tenant: str) -> None:
        self._answered.pop(tenant, None)
        self._answered[tenant] = self._step
        while self._step - next(iter(self._answered.values())) > RECENT_STEPS:
            del self._answered[next(iter(self._answered))]

    def plan_decodes(self, draft: PlanDraft) -> None:
        """Plan the decodes that the budget has tokens for; preempt some if memory is short."""
        decodes = self._decodes(draft.budget)
        lengths = [r.num_tokens for r in decodes]
        while decodes and not self.memory.before_decodes(lengths):
            if not self.protected.yield_least():
                if self._seats.in_flight:
                    self.must_settle = True
                    return
                self._seats.preempt_one(draft)
                decodes = [r for r in decodes if r.state is RequestState.RUNNING]
                lengths = [r.num_tokens for r in decodes]
        done = 0
        while done < len(decodes):
            batch = decodes[done:]
            handles = [r.handle for r in batch]
            until = [r.num_tokens for r in batch]
            served, rows = self._core.grow(np.array(handles, np.int32), np.array(until, np.int32))
            draft.add_pages(rows, handles)
            draft.add_decodes(batch[:served])
            done += served
            if done < len(decodes) and self.memory.give(len(decodes), len(decodes)):
                continue
            if done < len(decodes) and self.protected.yield_least():
                continue
            if done < len(decodes) and self._seats.in_flight:
                self.must_settle = True
                return
            if done < len(decodes) and self._seats.preempt_one(draft) in decodes[done:]:
                decodes = [r for r in decodes if r.state is RequestState.RUNNING]

    def _decodes(self, budget: int) -> list[Request]:
        """Return the decodes that the budget has tokens for, in order of admission."""
        decodes = []
        for request in self._seats.wanting():
            if request.is_decoding and self._seats.may_run(request) and not request.outgrows_table:
                budget -= request.remaining
                if budget < 0:
                    break
                decodes.append(request)
        return decodes

    def plan_prefills(self, draft: PlanDraft) -> None:
        """Plan chunks of running requests' prompts, in order of admission."""
        if len(draft.work) == len(self._seats.running):
            return  # every running request decodes
        for request in [r for r in self._seats.wanting() if not r.is_decoding]:
            if self.prompt_budget(draft) <= 0:
                return
            self.plan_chunk(request, draft)

    def plan_offloaded(self, draft: PlanDraft) -> None:
        """Plan chunks of prompts whose pages are in the CPU buffer, in order of admission."""
        for request in self._seats.offloaded:
            if not request.is_decoding and request.wants_work and self.prompt_budget(draft) > 0:
                self.plan_chunk(request, draft)

    def prompt_budget(
        self, draft: PlanDraft, request: Request | None = None, *, parks: bool = False
    ) -> int:
        """Return the number of prompt tokens that the step may still compute.

        :param request: the request that they belong to; None: that of any tenant.
        :param parks: whether the step parks decodes for them.
        """
        bounds = [draft.budget]
        enough, crowded = self._limits.enough_prompt_tokens, self._limits.crowded_prompt_tokens
        prompt_tokens = draft.prompt_tokens_of.total()
        if enough is not None and prompt_tokens:
            bounds.append(enough - prompt_tokens)
        if crowded is not None and (parks or self._is_crowded()):
            bounds.append(crowded - prompt_tokens)
        if request is not None:
            shared = self._shared_budget(request.turn.tenant, draft)
            bounds += [] if shared is None else [shared]
        return min(bounds)

    def _shared_budget(self, tenant: str, draft: PlanDraft) -> int | None:
        """Return how many prompt tokens of a tenant the step may still compute, since requests of
        other tenants wait for it or soon may; None: as many as of any."""
        if self._shared_prompt_tokens is None:
            return None
        if self._tenants is None:
            self._tenants = self._present()
        tenants, askers = self._tenants
        if not tenants - {tenant}:
            return None
        part = max(LEAST_PART_TOKENS, self._shared_prompt_tokens // len(askers | {tenant}))
        return max(part, self._limits.observing_tokens) - draft.prompt_tokens_of[tenant]

    def _present(self) -> tuple[frozenset[str], frozenset[str]]:
        running = [request for request in self._seats.running if self._seats.may_run(request)]
        askers = {request.turn.tenant for request in running if not request.is_decoding}
        if (first := self._seats.waiting.first()) is not None:
            askers.add(first.turn.tenant)
        recent = {
            tenant for tenant, step in self._answered.items() if self._step - step <= RECENT_STEPS
        }
        tenants = askers | recent | {request.turn.tenant for request in running}
        return frozenset(tenants), frozenset(askers)

    def _is_crowded(self) -> bool:
        """Return whether decodes are parked for lack of pages, not seats: the pool is full."""
        has_seats = len(self._seats.running) < self._limits.max_num_seqs
        return has_seats and self._seats.parking is not None and bool(self._seats.parking.parked)

    def plan_chunk(self, request: Request, draft: PlanDraft) -> bool:
        """Plan as many of the request's known tokens as budget and memory allow."""
        budget = draft.budget if request.is_decoding else self.prompt_budget(draft, request)
        if request.is_scored:
            budget = min(budget, self._scored_budget(request, draft))
        if (
            request.outgrows_table
            or not self._seats.may_run(request)
            or not has_budget(request, budget, self._limits)
        ):
            return False
        wanted = min(request.computed + min(request.remaining, budget), request.end_for_now)
        least = least_end(request, wanted, self._limits)
        until = self._largest(request, wanted, draft)
        while until < least and self.protected.yield_least():
            until = self._largest(request, wanted, draft)
        if until < wanted and self._seats.in_flight:
            self.must_settle = True
            return False
        if until < wanted:
            self._seats.rungs["shrink_chunk" if until >= least else "defer"] += 1
        if until < least:
            return False
        if request.state is not RequestState.OFFLOADED:
            _, rows = self._core.grow(_ints([request.handle]), _ints([until]))
            draft.add_pages(rows, [request.handle])
        if not request.is_decoding:
            draft.prompt_tokens_of[request.turn.tenant] += until - request.computed
        draft.add_work(request, until - request.computed)
        return True

    def _scored_budget(self, request: Request, draft: PlanDraft) -> int:
        """Return the number of prompt tokens that may be scored, each of which takes a logits row.

        Every other seat keeps a row; the request has its own, so it advances in every step.
        """
        others = sum(other is not request for other in self._seats.running)
        return max(0, self._limits.max_num_seqs - max(draft.num_logits, others))

    def plan_draft_tokens(self, draft: PlanDraft, undrafted: Collection[RequestId]) -> None:
        """Add draft tokens to decodes, with the budget that all other work leaves.

        :param undrafted: requests that get none.
        """
        if not self._speculation.is_on:
            return
        decoding = {
            request.handle: request
            for request in self._seats.running
            if request.is_decoding and request.request_id not in undrafted
        }
        budget = min(draft.budget, self._limits.max_step_draft_tokens)
        if decoding:
            budget = self.memory.most_draft_tokens(
                budget, self.planned_tokens(draft), draft.num_logits
            )
        new_pages = bool(decoding) and budget > 0 and self._may_grow_for_draft_tokens(draft)
        for index, work in enumerate(draft.work):
            if budget > 0 and work.handle in decoding:
                tokens, rows = self._speculation.draft_tokens(
                    decoding[work.handle], budget, new_pages
                )
                draft.add_pages(rows, [work.handle])
                draft.add_draft_tokens(index, tokens)
                budget -= len(tokens)

    def _may_grow_for_draft_tokens(self, draft: PlanDraft) -> bool:
        waits = bool(self._seats.waiting) and len(self._seats.running) < self._limits.max_num_seqs
        return not draft.preempted and not waits and self._speculation.has_room(self._seats.running)

    def planned_tokens(self, draft: PlanDraft) -> int:
        return self._limits.max_num_batched_tokens - draft.budget

    def _largest(self, request: Request, wanted: int, draft: PlanDraft) -> int:
        """Return up to which token, at most ``wanted``, memory allows; never inside tokens that
        one step must compute together."""
        tokens = self.planned_tokens(draft)
        rows = len(draft.work)
        if draft.has_scored:
            rows = max(rows, draft.num_logits)
        if request.is_scored:
            rows += wanted - request.computed
        if request.state is RequestState.OFFLOADED:
            count = wanted - request.computed
            return request.computed + max(0, self.memory.affordable(count, tokens, rows))
        until = self.memory.largest(request.handle, request.computed, wanted, tokens, rows)
        if self._limits.whole_images:
            cut = [s for s, tokens, _ in request.spec.images if s < until < s + tokens]
            until = min([until, *cut])
        observing = len(request.prompt) - self._limits.observing_tokens
        if self.drops(request) and observing < until < len(request.prompt):
            until = observing
        return until

    def drops(self, request: Request) -> bool:
        return self._budget_tokens is not None and len(request.prompt) > self._budget_tokens

    def checkpoints(self, draft: PlanDraft) -> NewPages:
        """Plan state checkpoints, after all other work has its pages, and cut the work there."""
        if not self._has_states:
            return np.empty((0, 5), np.int32)
        others = {request.handle for request in self._seats.running if request.is_decoding}
        others |= {request.handle for request in self._seats.offloaded}
        chunks = [work for work in draft.work if work.handle not in others]
        handles = _ints(work.handle for work in chunks)
        rows = self._core.checkpoint(handles, _ints(w.start + w.count for w in chunks))
        rows[:, 0] = handles[rows[:, 0]]
        draft.cut({(int(handle), int(end)) for handle, _, end, _, _ in rows})
        return rows


def _ints(values: Iterable[int]) -> NewPages:
    return np.fromiter(values, np.int32)
