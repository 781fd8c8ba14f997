"""The scheduler: requests and memory in, a step plan out.

Pure: no clock, no I/O, no torch.  One step is planned as

1. decodes, in order of admission; when memory runs out the youngest running
   request is preempted;
2. prefill chunks in order of admission, each as large as the token budget and
   the memory allow;
3. admissions in turn (:mod:`kvell.engine.requests.turns`), none in a step that
   preempted: a request is admitted when its whole remaining prompt fits beside what
   the running ones still need;
4. draft tokens (:mod:`kvell.engine.planning.speculation`), with what is left.

Without chunked prefill (:mod:`kvell.engine.planning.whole_prompts`) 2 and 3 come first, and 1
only in a step without them.

Prefixes that several requests share may be protected (:mod:`kvell.engine.planning.protected`).
Protection is given up before a request is preempted or put off, and before one waits while none
runs.

A request that runs out of pages while nobody else runs is blocked by the way its own pages are
scattered over large pages.  It starts again from nothing and runs alone, for which the contract's
page counts (:mod:`kvell.prefix.groups.capacity`) promise enough pages.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from kvell.engine.cpu_buffer.parking import ROOM_TOKENS, Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.embedded import embedded_images
from kvell.engine.planning.plan_draft import PlanDraft
from kvell.engine.planning.protected import ProtectedPrefixes
from kvell.engine.planning.speculation import Speculation
from kvell.engine.planning.step_memory import RigidMemory, StepMemory
from kvell.engine.planning.whole_prompts import has_budget, least_end, require_whole_prompts
from kvell.engine.requests.cache_roots import DROPPING_ROOT
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import NewPages, PageCopy, StepPlan
from kvell.engine.requests.request import NO_HANDLE, Request, RequestState
from kvell.engine.requests.turns import TurnQueue
from kvell.memory import GroupKind, MemoryCore, alignment_tokens, common_prefix
from kvell.vocabulary import StepNumber

INITIAL_EXPECTED_OUTPUT = 128
"""Output tokens expected of a request until one has finished."""

COMPACT_LARGE_PAGES = 4
"""Most large pages into which one step gathers scattered pages."""

MAX_HELD_BACK = 16
"""Most requests that wait for a prefix while others are admitted past them."""


class Scheduler:
    """Queues of requests over one memory core."""

    def __init__(
        self,
        core: MemoryCore,
        limits: Limits,
        memory: StepMemory | None = None,
        swapping: Swapping | None = None,
        parking: Parking | None = None,
    ) -> None:
        """:param swapping: the CPU buffer; None if preempted requests lose what they computed.
        :param parking: over ``swapping``, if prompts may go ahead of decodes."""
        self.core, self.swapping, self.parking = core, swapping, parking
        self.limits = limits
        self.memory: StepMemory = memory or RigidMemory(core)
        self.waiting: TurnQueue[Request] = TurnQueue()
        self.arrived: deque[Request] = deque()
        self.running: list[Request] = []
        self.rungs = dict.fromkeys(("shrink_chunk", "defer", "wait_for_prefix", "preempt"), 0)
        self._has_states = any(g.kind is GroupKind.STATE for g in core.layout.groups)
        dropping = (g for g in core.layout.groups if g.kind is GroupKind.DROPPING)
        self._budget_tokens = min((group.window_tokens for group in dropping), default=None)
        self.protected = ProtectedPrefixes(core, limits)
        self._speculation = Speculation(core, limits)
        self._alignment_tokens = {
            model: alignment_tokens([g for g in core.layout.groups if g.model == model])
            for model in {group.model for group in core.layout.groups}
        }
        self.must_settle = False
        self._in_flight = 0
        self.steps_put_off = 0  # latest steps in a row that had work but no memory for any of it
        self._finished_outputs: dict[str, tuple[int, int]] = {}
        self._released: list[int] = []
        self._lends = memory is not None
        require_whole_prompts(limits, shares_pool=self._lends, parks=parking is not None)
        self._turned_away: Request | None = None
        self._made_way_in_vain: Request | None = None
        if memory is not None and self._speculation.is_on:
            raise ValueError("draft tokens have no activations of their own in a shared pool yet")

    def enqueue(self, request: Request) -> None:
        """Let a new request wait for its turn."""
        self.waiting.add(request)

    def note_lateness(self, *, ttft_late: bool, tpot_late: bool) -> None:
        """Take in whether requests were late in the last step."""
        if self.parking is not None:
            self.parking.sizes.note_iteration(ttft_late=ttft_late, tpot_late=tpot_late)

    def let_go(self) -> None:
        """Give up all protected prefixes, and those in the CPU buffer."""
        self.protected.yield_all()
        if self.swapping is not None:
            self.swapping.let_go()

    # ------------------------------------------------------------------ planning

    def plan(self, step: StepNumber, in_flight: int = 0) -> StepPlan:
        """Decide step ``step``; pages are taken, nothing is computed yet.

        :param in_flight: number of planned steps whose results are pending.
        """
        self._in_flight, self.must_settle = in_flight, False
        self.core.begin_step(step)
        self.memory.begin(step)
        if self.swapping is not None:
            self.swapping.begin()
        if self.parking is not None:
            self.parking.begin(step)
        self.protected.renew(self.running)
        draft = PlanDraft(self.limits.max_num_batched_tokens)
        if self.swapping is not None:
            draft.offload(self.swapping.copy_out(self._wanted_large()))
        self._enter_arrived(draft)
        self._plan_running(draft)
        if not draft.preempted and not self.must_settle:
            self._unpark(draft)
            self._admit(draft)
        if not self.limits.enable_chunked_prefill and not draft.work:
            self._plan_decodes(draft)
        self._unstick(draft)
        if self._speculation.is_on:
            self._draft_token(draft)
        self._grant(step, draft)
        released, self._released = tuple(self._released), []
        checkpoints = self._checkpoints(draft)
        draft.add_moved(self.core.compact(COMPACT_LARGE_PAGES))
        return StepPlan(
            step,
            released=released,
            offloads=draft.offloads,
            fetches=draft.fetches,
            copies=self._copies(draft),
            new_pages=draft.new_pages(),
            work=tuple(draft.work),
            checkpoints=checkpoints,
            preempted=tuple(draft.preempted),
            parked=tuple(draft.parked),
            admitted=tuple(draft.admitted),
            slot=self.memory.slot,
            pools=draft.has_pooled,
        )

    @property
    def may_plan_ahead(self) -> bool:
        """Whether there is anything to plan before the results of steps in flight arrive.

        False while memory is short: nobody is preempted or put off for want of pages that a
        result may free.  False too while the sampling of a request needs its latest token.
        """
        if self.must_settle or any(request.sampling.looks_back for request in self.running):
            return False
        return bool(self.waiting) or any(request.wants_work for request in self.running)

    @property
    def num_wanting(self) -> int:
        """Number of running requests that still have tokens to compute, this step included."""
        return len(self._wanting())

    def _wanting(self) -> list[Request]:
        """Running requests that still have tokens to compute; all if no step is in flight."""
        return [r for r in self.running if r.wants_work] if self._in_flight else self.running

    def _grant(self, step: StepNumber, draft: PlanDraft) -> None:
        """Get activations for the whole step; work that the device refuses is put off."""
        planned = len(draft.work)
        while not self.memory.grant(step, self._tokens(draft), draft.num_logits):
            draft.put_off_last()
        if draft.work or not planned:
            self.steps_put_off = 0
        else:
            self.steps_put_off += 1

    def _plan_running(self, draft: PlanDraft) -> None:
        """Plan what comes before admissions."""
        if self.limits.enable_chunked_prefill:
            self._plan_decodes(draft)
        self._plan_prefills(draft)

    def _plan_decodes(self, draft: PlanDraft) -> None:
        decodes = self._decodes(draft.budget)
        lengths = [r.num_tokens for r in decodes]
        while decodes and not self.memory.before_decodes(lengths):
            if not self.protected.yield_least():
                self._preempt_youngest(draft)
                decodes = [r for r in decodes if r.state is RequestState.RUNNING]
                lengths = [r.num_tokens for r in decodes]
        done = 0
        while done < len(decodes):
            batch = decodes[done:]
            handles = [r.handle for r in batch]
            until = [r.num_tokens for r in batch]
            served, rows = self.core.grow(np.array(handles, np.int32), np.array(until, np.int32))
            draft.add_pages(rows, handles)
            draft.add_decodes(batch[:served])
            done += served
            if done < len(decodes) and self.memory.give(len(decodes), len(decodes)):
                continue
            if done < len(decodes) and self.protected.yield_least():
                continue
            if done < len(decodes) and self._in_flight:
                self.must_settle = True
                return
            if done < len(decodes) and self._preempt_youngest(draft) in decodes[done:]:
                decodes = [r for r in decodes if r.state is RequestState.RUNNING]

    def _decodes(self, budget: int) -> list[Request]:
        """The decodes that the budget has tokens for, in order of admission."""
        decodes = []
        for request in self._wanting():
            if request.is_decoding:
                budget -= request.remaining
                if budget < 0:
                    break
                decodes.append(request)
        return decodes

    def _plan_prefills(self, draft: PlanDraft) -> None:
        if len(draft.work) == len(self.running):
            return  # every running request decodes
        for request in [r for r in self._wanting() if not r.is_decoding]:
            if self._prompt_budget(draft) <= 0:
                return
            self._plan_chunk(request, draft)

    def _prompt_budget(self, draft: PlanDraft, *, parks: bool = False) -> int:
        """Prompt tokens that the step may still compute.

        :param parks: whether the step parks decodes for them.
        """
        most = [draft.budget]
        enough, crowded = self.limits.enough_prompt_tokens, self.limits.crowded_prompt_tokens
        if enough is not None and draft.prompt_tokens:
            most.append(enough - draft.prompt_tokens)
        if crowded is not None and (parks or self._is_crowded()):
            most.append(crowded - draft.prompt_tokens)
        return min(most)

    def _is_crowded(self) -> bool:
        """Whether decodes are parked for want of pages, not of seats: a step reads a full pool."""
        has_seats = len(self.running) < self.limits.max_num_seqs
        return has_seats and self.parking is not None and bool(self.parking.parked)

    def _plan_chunk(self, request: Request, draft: PlanDraft) -> bool:
        """Plan as many of the request's known tokens as budget and memory allow."""
        budget = draft.budget if request.is_decoding else self._prompt_budget(draft)
        if request.is_scored:
            budget = min(budget, self._scored_budget(request, draft))
        if not has_budget(request, budget, self.limits):
            return False
        wanted = request.computed + min(request.remaining, budget)
        least = least_end(request, wanted, self.limits)
        until = self._largest(request, wanted, draft)
        while until < least and self.protected.yield_least():
            until = self._largest(request, wanted, draft)
        if until < wanted and self._in_flight:
            self.must_settle = True
            return False
        if until < wanted:
            self.rungs["shrink_chunk" if until >= least else "defer"] += 1
        if until < least:
            return False
        _, rows = self.core.grow(_ints([request.handle]), _ints([until]))
        draft.add_pages(rows, [request.handle])
        if not request.is_decoding:
            draft.prompt_tokens += until - request.computed
        draft.add_work(request, until - request.computed)
        return True

    def _scored_budget(self, request: Request, draft: PlanDraft) -> int:
        """Prompt tokens that may be scored: each has a row of logits, and so has every seat.

        Its own seat's row is the request's, so it advances in every step.
        """
        others = sum(other is not request for other in self.running)
        return max(0, self.limits.max_num_seqs - max(draft.num_logits, others))

    def _draft_token(self, draft: PlanDraft) -> None:
        """Add draft tokens to decodes, with what all other work has left."""
        decoding = {request.handle: request for request in self.running if request.is_decoding}
        most = min(draft.budget, self.limits.max_step_draft_tokens)
        new_pages = bool(decoding) and most > 0 and self._may_grow_for_draft_tokens(draft)
        for index, work in enumerate(draft.work):
            if most > 0 and work.handle in decoding:
                tokens, rows = self._speculation.draft_tokens(
                    decoding[work.handle], most, new_pages
                )
                draft.add_pages(rows, [work.handle])
                draft.add_draft_tokens(index, tokens)
                most -= len(tokens)

    def _may_grow_for_draft_tokens(self, draft: PlanDraft) -> bool:
        waits = bool(self.waiting) and len(self.running) < self.limits.max_num_seqs
        return not draft.preempted and not waits and self._speculation.has_room(self.running)

    def _tokens(self, draft: PlanDraft) -> int:
        return self.limits.max_num_batched_tokens - draft.budget

    def _largest(self, request: Request, wanted: int, draft: PlanDraft) -> int:
        """How far memory allows, up to ``wanted``; never inside tokens that one step must compute
        together."""
        tokens, rows = self._tokens(draft), len(draft.work)
        if draft.has_scored:
            rows = max(rows, draft.num_logits)
        if request.is_scored:
            rows += wanted - request.computed
        until = self.memory.largest(request.handle, request.computed, wanted, tokens, rows)
        if self.limits.whole_images:
            cut = [s for s, tokens, _ in request.image_rows if s < until < s + tokens]
            until = min([until, *cut])
        observing = len(request.prompt) - self.limits.observing_tokens
        if self._drops(request) and observing < until < len(request.prompt):
            until = observing
        return until

    def _drops(self, request: Request) -> bool:
        """Whether the request will keep only a part of its prompt."""
        return self._budget_tokens is not None and len(request.prompt) > self._budget_tokens

    def looks_up(self, request: Request) -> bool:
        """Whether a prefix of the request may be found in the cache, and is kept there."""
        return not (request.is_scored or request.runs_alone or self._drops(request))

    def _root(self, request: Request) -> str:
        """The cache root of a request's prefix.

        A request that drops tokens hits no prefix, since its last tokens must all be computed to
        choose what to keep; nothing is ever cached under the root of such requests.
        """
        if self._drops(request):
            return DROPPING_ROOT
        return request.cache_root

    def _copies(self, draft: PlanDraft) -> tuple[PageCopy, ...]:
        """Copy-on-write copies of this step, without those of preempted requests."""
        rows = self.core.copies().tolist()
        return tuple(PageCopy(*row[1:]) for row in rows if row[0] not in draft.forgotten)

    def _checkpoints(self, draft: PlanDraft) -> NewPages:
        """Plan state checkpoints, once all else has its pages, and cut the work there."""
        if not self._has_states:
            return np.empty((0, 5), np.int32)
        decoding = {request.handle for request in self.running if request.is_decoding}
        chunks = [work for work in draft.work if work.handle not in decoding]
        handles = _ints(work.handle for work in chunks)
        rows = self.core.checkpoint(handles, _ints(w.start + w.count for w in chunks))
        rows[:, 0] = handles[rows[:, 0]]
        draft.cut({(int(handle), int(end)) for handle, _, end, _, _ in rows})
        return rows

    # ----------------------------------------------------------------- admission

    def _admit(self, draft: PlanDraft) -> None:
        held_back: list[Request] = []
        while len(held_back) < MAX_HELD_BACK and self._may_admit(draft):
            request = self.waiting.first()
            assert request is not None
            self.waiting.take(request)
            if self._waits_for_prefix(request):
                held_back.append(request)
            elif not self._admit_next(request, draft):
                self.waiting.put_back([request])
                break
        self.waiting.put_back(held_back)

    def _may_admit(self, draft: PlanDraft) -> bool:
        if not self.waiting or self._prompt_budget(draft) <= 0:
            return False
        if self.parking is None:
            return self._has_seats(draft)
        return not self.parking.comes_first and not self._runs_alone()

    def _has_seats(self, draft: PlanDraft) -> bool:
        free_seats = self.limits.max_num_seqs - len(self._wanting())
        return draft.budget > 0 and free_seats > 0 and not self._runs_alone()

    def _runs_alone(self) -> bool:
        return any(request.runs_alone for request in self.running)

    def _unpark(self, draft: PlanDraft) -> None:
        """Readmit parked decodes before any prompt, each with its fetch, in order of arrival."""
        while self.parking is not None and self.parking.parked and self._has_seats(draft):
            request = self.parking.parked[0]
            if not self._admit_one(request, draft, ROOM_TOKENS if self.running else 0):
                return
            self.parking.leave(request)

    def _admit_next(self, request: Request, draft: PlanDraft) -> bool:
        if self._has_seats(draft) and self._admit_one(request, draft):
            return True
        return self._admit_ahead(request, draft)

    def _admit_ahead(self, request: Request, draft: PlanDraft) -> bool:
        """Park decodes in the CPU buffer until the request's prompt can go ahead of them."""
        if self.parking is None or self.swapping is None or self._is_swapped(request):
            return False
        if request is self._made_way_in_vain or self._prompt_budget(draft, parks=True) <= 0:
            return False
        for other in self.parking.give_way(request, self.running, draft.admitted):
            size_bytes = self.swapping.size_bytes(other)
            self.running.remove(other)
            draft.offload(self.swapping.save(other, asks=False))
            self._give_up(other, draft)
            self.parking.park(other, size_bytes)
            draft.parked.append(other.request_id)
            if self._admit_one(request, draft):
                return True
            # Not again until a request ends: else decodes would go out and come back in vain.
            self._made_way_in_vain = request
        return False

    def _admit_one(self, request: Request, draft: PlanDraft, room_tokens: int = 0) -> bool:
        """Admit the request if it fits; return whether it was admitted.

        :param room_tokens: tokens of room for every request, beyond what the next step needs.
        """
        if self.running and request is self._turned_away and not self.core.may_fit():
            return False
        tokens = request.tokens(0, request.num_tokens)
        if request.runs_alone:
            self.protected.yield_all()
        handle = self.core.open(
            tokens,
            self._root(request),
            reuse=not request.runs_alone,
            images=request.images,
            prompt_tokens=len(request.prompt),
            model=request.model,
        )
        request.handle, request.computed = handle, self.core.hit_tokens(handle)
        if self.swapping is not None:
            self.swapping.resume(request)
        request.settled = request.computed
        if self._fits(request, draft, room_tokens) and self._start(request, draft):
            return True
        self.core.close(handle, renew=False)
        request.handle = NO_HANDLE
        request.computed = request.settled = request.repeats = 0
        asks_again = self._lends or request.runs_alone or self._is_swapped(request)
        self._turned_away = None if asks_again else request
        if not self.running and self.protected.yield_all():
            return self._admit_one(request, draft)
        if self.running or request.runs_alone or not self.memory.is_complete:
            return False
        request.runs_alone = True  # the cached pages that it would reuse are in its way
        return self._admit_one(request, draft)

    def _enter_arrived(self, draft: PlanDraft) -> None:
        """Let requests run whose pages came from another instance, as far as there are seats."""
        while self.arrived and len(self.running) < self.limits.max_num_seqs:
            if self._runs_alone():
                return
            request = self.arrived.popleft()
            expected_tokens = request.num_tokens + self._expected_output(request)
            will_return = request.sampling.will_return
            self.core.claim(request.handle, expected_tokens, will_return=will_return)
            beyond = request.tokens(request.computed, request.num_tokens)
            self.core.append(np.full(len(beyond), request.handle, np.int32), beyond)
            draft.add_pages(self.core.held_pages(request.handle), [request.handle])
            request.state = RequestState.RUNNING
            self._enter(request)
            draft.admitted.append(request.request_id)

    def has_room_for(self, handle: int, computed: int) -> bool:
        """Whether a text may come from elsewhere, beside what running requests need next."""
        others = _ints(request.handle for request in self.running)
        until = _ints(request.num_tokens + 1 for request in self.running)
        return self.core.fits(handle, computed + 1, 1, others, until)

    def lift(self, request: Request) -> None:
        """Take a running request out of the steps; its pages stay."""
        self.running.remove(request)
        request.state = RequestState.MOVING

    def resume(self, request: Request) -> None:
        """Let a request that was lifted go on; it waits if its seat is taken."""
        if len(self.running) < self.limits.max_num_seqs:
            request.state = RequestState.RUNNING
            self._enter(request)
            return
        self._close(request, returns=True)
        request.state = RequestState.WAITING
        request.computed = request.settled = request.repeats = 0
        self.waiting.put_back([request])

    def _wanted_large(self) -> int:
        """Most large pages that the first waiting request will ask for."""
        first = self.waiting.first()
        if first is None:
            return 0
        return sum(
            -(-first.num_tokens // (group.page_tokens * group.pages_per_large))
            for group in self.core.layout.groups
            if group.model == first.model and group.kind.counts_tokens
        )

    def _start(self, request: Request, draft: PlanDraft) -> bool:
        expected_tokens = request.num_tokens + self._expected_output(request)
        will_return = request.sampling.will_return
        self.core.claim(request.handle, expected_tokens, will_return=will_return)
        held = self.core.held_pages(request.handle)
        request.embedded = embedded_images(self.core.layout.groups, held, request.image_rows)
        if not self._plan_chunk(request, draft):
            return False
        draft.add_pages(held, [request.handle])
        if self.swapping is not None:
            draft.fetch(self.swapping.fetch(request, held))
        request.state = RequestState.RUNNING
        self._enter(request)
        draft.admitted.append(request.request_id)
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
            self.protected.admitted(
                request, self._expected_output(request), len(self.running) + len(self.waiting)
            )
        return True

    def _enter(self, request: Request) -> None:
        """Insert the request into ``running``, whose last one gives way first.

        Requests are in order of admission; with parking, in order of arrival.
        """
        place = len(self.running)
        while (
            self.parking is not None and place and self.running[place - 1].number > request.number
        ):
            place -= 1
        self.running.insert(place, request)

    def _fits(self, request: Request, draft: PlanDraft, room_tokens: int) -> bool:
        """Whether the whole remaining prompt fits beside what running requests need next."""
        others = _ints(r.handle for r in self.running)
        until = _ints(r.num_tokens + 1 + room_tokens for r in self.running)
        chunk = min(request.remaining, self.limits.min_chunk_tokens)
        self.memory.before_admission(chunk, self._tokens(draft), len(draft.work))
        wanted = request.num_tokens + room_tokens
        return self.core.fits(request.handle, wanted, chunk, others, until)

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a running request is about to publish more of this prompt than is cached."""
        if request.prefix_wait_steps >= self.limits.max_prefix_wait_steps:
            return False
        if self._is_swapped(request):
            return False
        ahead = max((self._shared_ahead(request, other) for other in self.running), default=0)
        if not ahead or ahead <= self._peek(request):
            return False
        request.prefix_wait_steps += 1
        self.rungs["wait_for_prefix"] += 1
        return True

    def _is_swapped(self, request: Request) -> bool:
        return self.swapping is not None and self.swapping.has(request)

    def _peek(self, request: Request) -> int:
        return self.core.peek(
            request.tokens(0, request.num_tokens),
            self._root(request),
            images=request.images,
            prompt_tokens=len(request.prompt),
            model=request.model,
        )

    def _shared_ahead(self, request: Request, other: Request) -> int:
        """Length of the prefix that both share, if ``other`` has not computed it all; else 0."""
        if other.settled >= len(other.prompt) or other.cache_root != request.cache_root:
            return 0
        if other.model != request.model:
            return 0
        if self._drops(request) or self._drops(other):
            return 0
        shared = min(common_prefix(request.prompt, other.prompt), request.num_tokens - 1)
        shared -= shared % self._alignment_tokens[request.model]
        return shared if shared > other.settled else 0

    def _expected_output(self, request: Request) -> int:
        count, total = self._finished_outputs.get(request.model, (0, 0))
        mean = total // count if count else INITIAL_EXPECTED_OUTPUT
        return max(1, min(request.max_tokens, mean) - len(request.output))

    # ------------------------------------------------------------------- release

    def finish(self, request: Request) -> None:
        """End the request, whatever its state, and give its pages back."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            if self.swapping is not None and not request.is_spoiled:
                self.swapping.ended(request)
            self._close(request)
        elif request in self.waiting:
            self.waiting.discard(request.request_id)
        elif request.state is RequestState.MOVING or request in self.arrived:
            if request in self.arrived:
                self.arrived.remove(request)
            self._close(request)
        if self.swapping is not None:
            self.swapping.forget(request)
        if self.parking is not None:
            self.parking.leave(request)
        request.state = RequestState.FINISHED
        self._made_way_in_vain = None
        if request.pooling:
            return  # it says nothing of how long answers are
        count, total = self._finished_outputs.get(request.model, (0, 0))
        self._finished_outputs[request.model] = (count + 1, total + len(request.output))

    def _preempt_youngest(self, draft: PlanDraft) -> Request:
        """Preempt the youngest request: its pages are freed, maybe copied to the CPU buffer."""
        victim = self.running.pop()
        size_bytes = 0
        if self.swapping is not None:
            size_bytes = self.swapping.size_bytes(victim)
            draft.offload(self.swapping.save(victim))
        victim.runs_alone |= not self.running
        self._give_up(victim, draft)
        victim.preemptions += 1
        if self.parking is not None and self._is_swapped(victim):
            self.parking.park(victim, size_bytes, gave_way=False)
            draft.parked.append(victim.request_id)
        else:
            self.waiting.put_back([victim])
        draft.preempted.append(victim.request_id)
        self.rungs["preempt"] += 1
        return victim

    def _give_up(self, request: Request, draft: PlanDraft) -> None:
        """Take a request off the step and close its pages; it is waiting again."""
        draft.forget(request)
        self._close(request, returns=True)
        request.state = RequestState.WAITING
        request.computed = request.settled = request.repeats = 0

    def _unstick(self, draft: PlanDraft) -> None:
        """Preempt the youngest while running requests block each other for want of pages."""
        if self._in_flight:
            self.must_settle |= not draft.work
            return
        while not draft.work and self.running:
            self._preempt_youngest(draft)
            self._plan_decodes(draft)
            if self.limits.enable_chunked_prefill or not draft.work:
                self._plan_prefills(draft)

    def _close(self, request: Request, *, returns: bool = False) -> None:
        self.core.close(request.handle, renew=not request.is_spoiled, returns=returns)
        self._released.append(request.handle)
        request.handle = NO_HANDLE


def _ints(values: Iterable[int]) -> NewPages:
    return np.fromiter(values, np.int32)
