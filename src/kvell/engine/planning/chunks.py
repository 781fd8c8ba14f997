"""Work of a step for running requests: decodes, prefill chunks, draft tokens; pure.

The memory core and the owner of activation memory decide how much of it fits.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvell.cost.swap_rule import WAYS
from kvell.elastic.memory import ints_of
from kvell.elastic.page_buffer import first_pages
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.plan_draft import PlanDraft
from kvell.engine.planning.proposals import Ints, propose
from kvell.engine.planning.protected import ProtectedPrefixes
from kvell.engine.planning.request_queues import RequestQueues
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.planning.whole_prompts import has_budget, least_end
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import TO_DRAFT, NewPages
from kvell.engine.requests.request import NO_HANDLE, Request, RequestState
from kvell.memory import IMAGE_KINDS, GroupKind, MemoryCore
from kvell.mempool.tiers.lookup import SERVED_KINDS
from kvell.pages.rows import CheckpointRow
from kvell.vocabulary import RequestId, StepNumber

TEXT_KINDS = frozenset({GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED})


class Speculation:
    """The planner of draft tokens over one memory core.

    Draft tokens are planned after all other work of a step.  They take the rest of the token
    budget, and new pages only if every running request could still continue and no request waits
    for memory: no request is preempted, deferred or refused for a draft token.  The request's next
    tokens need those pages anyway, or a little later if draft tokens are rejected.

    A state cannot be rolled back to before a rejected draft token.  So states advance over known
    tokens only: a step computes draft tokens from them, and discards the resulting states.  The
    next step computes accepted draft tokens once more, with the newest token.

    Requests that run alone get no draft tokens: they have memory for themselves only.  Nor do
    requests whose grammar's masks are slow
    (:mod:`kvell.engine.sampling.grammar_process.answer_masks`).  A draft model proposes for the
    first of several models; requests of the others get none.

    A token that a reasoning budget will force is a draft token too; a draft model draws it by
    itself, under the request's sampling.

    Draft tokens end at the short rotation table of their request and the draft model's context.

    Groups whose positions are not the text's take no pages for draft tokens when memory is short.
    """

    def __init__(self, core: MemoryCore, limits: Limits) -> None:
        groups = [g for g in core.layout.groups if g.kind is not GroupKind.STATE]
        self.is_on = limits.num_speculative_tokens > 0
        self._core = core
        self._limits = limits
        self._is_text = all(g.kind in TEXT_KINDS and not g.counts_images for g in groups)
        self._page_tokens = sorted({group.page_tokens for group in groups})
        self._drafted_models = {group.model for group in core.layout.groups if group.is_draft}

    def has_room(self, running: Sequence[Request]) -> bool:
        """Return whether all requests could take new pages for draft tokens, and still continue if
        all of these are rejected."""
        if any(request.runs_alone for request in running):
            return False
        count = self._limits.num_speculative_tokens + 1
        first, others = running[0], running[1:]
        return self._core.fits(
            first.handle,
            first.num_tokens + count,
            count,
            ints_of(r.handle for r in others),
            ints_of(r.num_tokens + count for r in others),
        )

    def draft_tokens(self, request: Request, budget: int, new_pages: bool) -> tuple[Ints, NewPages]:
        """Return the draft tokens to compute after the newest token, and the pages they take."""
        count = min(
            budget,
            self._limits.num_speculative_tokens,
            request.max_tokens - len(request.output) - 1,
        )
        if request.may_outgrow_table:
            count = min(count, request.short_rope_tokens - request.num_tokens)
        if self._limits.draft_tokens_end:
            count = min(count, self._limits.draft_tokens_end - request.num_tokens)
        can_draft = not (request.runs_alone or request.drawing)
        # Draft tokens are looked up, or the draft model is of the request's.
        is_drafted = not self._drafted_models or request.model in self._drafted_models
        if count <= 0 or not can_draft or not is_drafted:
            return np.empty(0, np.int32), np.empty((0, 4), np.int32)
        tokens = self._tokens(request, count)
        start = request.num_tokens
        until = request.num_tokens + len(tokens)
        if new_pages:
            until = self._core.largest(request.handle, until)
        else:
            # The number of tokens that fit into the pages that hold all tokens.
            ends = [-(-start // size) * size for size in self._page_tokens]
            fallback = start + self._limits.num_speculative_tokens
            until = min(until, min(ends, default=fallback) if self._is_text else start)
        _, rows = self._core.grow(ints_of([request.handle]), ints_of([until]))
        return tokens[: until - start], rows

    def _tokens(self, request: Request, count: int) -> Ints:
        limits = self._limits
        if limits.has_drafter:
            return np.full(count, TO_DRAFT, np.int32)
        longest = limits.prompt_lookup_max
        tokens = propose(request.history(), count, longest, limits.prompt_lookup_min)
        budget = request.sampling.reasoning_budget
        if budget is None or budget.end in request.output:
            return tokens
        place = budget.end_place(request.output[0]) - len(request.output)
        if not 0 <= place < min(len(tokens) + 1, count):
            return tokens
        return np.append(tokens[:place], np.int32(budget.end))


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
        self.memory = memory or StepMemory(core)
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
            until = np.array(lengths[done:], np.int32)
            served, rows = self._core.grow(np.array(handles, np.int32), until)
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
                lengths = [r.num_tokens for r in decodes]

    def _decodes(self, budget: int) -> list[Request]:
        decodes = []
        for request in self._seats.wanting():
            if request.is_decoding and self._seats.may_run(request) and not request.outgrows_table:
                budget -= request.remaining
                if budget < 0:
                    break
                decodes.append(request)
        return decodes

    def plan_prefills(self, draft: PlanDraft) -> None:
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
        """
        bounds = [draft.budget]
        enough, crowded = self._limits.enough_prompt_tokens, self._limits.crowded_prompt_tokens
        prompt_tokens = draft.prompt_tokens_of.total()
        if enough is not None and prompt_tokens:
            bounds.append(enough - prompt_tokens)
        if crowded is not None:
            # Decodes are parked for lack of pages, not seats: the pool is full.
            has_seats = len(self._seats.running) < self._limits.max_num_seqs
            parking = self._seats.parking
            if parks or (has_seats and parking is not None and parking.parked):
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

    def plan_chunk(self, request: Request, draft: PlanDraft) -> bool:
        """Plan as many of the request's known tokens as budget and memory allow."""
        budget = draft.budget if request.is_decoding else self.prompt_budget(draft, request)
        if request.is_scored:
            # Each scored token takes a logits row.  Every other seat keeps one, and the request has
            # its own, so it advances in every step.
            others = sum(other is not request for other in self._seats.running)
            free_rows = self._limits.max_num_seqs - max(draft.num_logits, others)
            budget = min(budget, max(0, free_rows))
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
            _, rows = self._core.grow(ints_of([request.handle]), ints_of([until]))
            draft.add_pages(rows, [request.handle])
        if not request.is_decoding:
            draft.prompt_tokens_of[request.turn.tenant] += until - request.computed
        draft.add_work(request, until - request.computed)
        return True

    def plan_draft_tokens(self, draft: PlanDraft, undrafted: Collection[RequestId]) -> None:
        """Add draft tokens to decodes, with the budget that all other work leaves."""
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
        has_seats = len(self._seats.running) < self._limits.max_num_seqs
        waits = bool(self._seats.waiting) and has_seats
        may_grow = bool(decoding) and budget > 0 and not draft.preempted and not waits
        new_pages = may_grow and self._speculation.has_room(self._seats.running)
        for index, work in enumerate(draft.work):
            if budget > 0 and work.handle in decoding:
                tokens, rows = self._speculation.draft_tokens(
                    decoding[work.handle], budget, new_pages
                )
                draft.add_pages(rows, [work.handle])
                draft.add_draft_tokens(index, tokens)
                budget -= len(tokens)

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
        handles = ints_of(work.handle for work in chunks)
        rows = self._core.checkpoint(handles, ints_of(w.start + w.count for w in chunks))
        rows[:, CheckpointRow.HANDLE] = handles[rows[:, CheckpointRow.HANDLE]]
        draft.cut({(int(handle), int(end)) for handle, _, end, _, _ in rows})
        return rows


OFFLOADED_ROOT = "\0offloaded"
"""Cache root of a holder whose pages are in the buffer; nothing is ever cached under it."""


class OffloadedPrompts:
    """The prompts that are computed into the buffer.

    ::

        WAITING ──no room in the pool, but in the buffer──► OFFLOADED ──first token──► PARKED
           ▲                                                    │                        │ fetched,
           └──────────── cancelled, finished ◄──────────────────┘                        ▼ if room
                                                                                     RUNNING

    The buffer is host memory after the pool, in the same range of addresses, so a pass writes each
    page once, wherever the plan says that it is (Algorithm 1, lines 8-11): nothing is copied until
    the decode is scheduled.  Only the activations of a step need room in the pool.

    A request has its own pages for all groups of its model: it resumes from no cached prefix, and
    publishes none before it has been fetched.

    :param first_large: number of the buffer's first large page, counted from the pool's first.
    :ivar is_leaving: whether a request will move to another instance when its prompt is computed.
    """

    def __init__(
        self,
        core: MemoryCore,
        seats: RequestQueues,
        swapping: Swapping,
        parking: Parking,
        first_large: int,
    ) -> None:
        self.first_large = first_large
        self.count = 0
        self.is_leaving: Callable[[Request], bool] = lambda request: False
        self._core, self._seats = core, seats
        self._swapping, self.parking = swapping, parking
        self._groups = core.layout.groups
        self._first_page = first_pages(self._groups, first_large)

    def size_bytes(self, request: Request) -> int:
        """Return the bytes of a request's prompt in the buffer; 0 if it cannot be there now."""
        if not self._can_be_there(request):
            return 0
        need = self._need(request)
        size_bytes = self._swapping.buffer.size_bytes(need)
        fits = self.parking.allows(size_bytes) and self._swapping.fits_all(need)
        return size_bytes if fits else 0

    def pays(self, request: Request, leaving: Sequence[Request]) -> bool:
        """Return whether a prompt should be computed into the buffer.

        Its pages are copied once, when its decode is scheduled; those of parked requests twice.
        If the buffer is far, each chunk of the prompt also reads the chunks before it there.

        :param leaving: the requests that would be parked for it; empty if that is not possible.
        """
        size_bytes = self.size_bytes(request)
        parked_bytes = sum(map(self._swapping.size_bytes, leaving))
        chunks = -(-request.num_tokens // self.parking.chunk_tokens)
        reads = (chunks - 1) / 2 if self._swapping.buffer.is_far else 0.0
        return size_bytes > 0 and (not leaving or size_bytes * (1 + reads) <= WAYS * parked_bytes)

    def begin(self, request: Request, draft: PlanDraft) -> None:
        """Give a waiting request pages in the buffer for its whole prompt."""
        need = self._need(request)
        request.handle = self._core.open(
            request.prompt, OFFLOADED_ROOT, reuse=False, model=request.model
        )
        pages = self._swapping.take(request, need)
        rows = [
            (request.handle, group, position, self._first_page[group] + page)
            for group, some in enumerate(pages)
            for position, page in enumerate(some)
        ]
        draft.add_moved(np.asarray(rows, np.int32).reshape(-1, 4))
        self.parking.hold(request, self._swapping.buffer.size_bytes(need))
        request.computed = request.settled = request.found_tokens = 0
        request.state = RequestState.OFFLOADED
        self._seats.offloaded.append(request)
        self.count += 1

    def park_computed(self) -> None:
        """Park the requests whose prompts are computed, with their first token."""
        for request in [r for r in self._seats.offloaded if r.is_decoding and not r.drawing]:
            self._swapping.keep_computed(request)
            self._seats.leave_buffer(request)
            self.parking.add(request)

    def give_up(self, request: Request, draft: PlanDraft) -> None:
        """Let a request wait again that has just been given pages, without work in this step."""
        draft.forget(request)
        self._seats.leave_buffer(request)
        self._swapping.forget(request)
        self.parking.leave(request)
        self.count -= 1

    def _need(self, request: Request) -> list[int]:
        """Return the number of pages of each group for the prompt; of states, one for each part."""
        tokens = len(request.prompt)
        need: list[int] = []
        for group in self._groups:
            if group.model != request.model or group.kind in IMAGE_KINDS:
                need.append(0)
            elif group.kind is GroupKind.STATE:
                need.append(group.slices)
            else:
                need.append(-(-tokens // group.page_tokens))
        return need

    def _can_be_there(self, request: Request) -> bool:
        kinds = {group.kind for group in self._groups if group.model == request.model}
        is_plain = kinds <= SERVED_KINDS | IMAGE_KINDS and not (
            request.spec.images or request.spec.pooling
        )
        is_new = request.handle == NO_HANDLE and not request.output and not request.runs_alone
        stays = not (request.local_tokens or request.remote_tokens or self.is_leaving(request))
        return is_plain and is_new and stays
