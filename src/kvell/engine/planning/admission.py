"""Admission of waiting requests in turn, parked ones, and those that arrived with pages; pure."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kvell.elastic.memory import ints_of
from kvell.engine.cpu_buffer.parking import ROOM_TOKENS
from kvell.engine.planning.chunks import Chunks, OffloadedPrompts
from kvell.engine.planning.plan_draft import PlanDraft
from kvell.engine.planning.request_queues import RequestQueues, makes_way
from kvell.engine.requests.cache_roots import DROPPING_ROOT, kept_root
from kvell.engine.requests.counting import group_hits
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import NewPages
from kvell.engine.requests.request import NO_HANDLE, Request, RequestState
from kvell.memory import GroupKind, GroupSpec, MemoryCore, alignment_tokens, common_prefix
from kvell.pages.rows import NewPageRow


def embedded_images(
    groups: Sequence[GroupSpec], held: NewPages, images: Sequence[tuple[int, int, int]]
) -> int:
    """Return how many leading images have all their pages when the request starts.

    :param held: int32 [m, :class:`.NewPageRow`], pages that the request starts with.
    """
    for index, group in enumerate(groups):
        positions = held[held[:, NewPageRow.GROUP] == index, NewPageRow.POSITION]
        if group.kind is GroupKind.VISION and len(positions):
            pages = (-(-tokens // group.page_tokens) for _, _, tokens in images)
            return sum(end <= int(positions.max()) + 1 for end in accumulate(pages))
    return 0


INITIAL_EXPECTED_OUTPUT = 128
"""Output tokens expected of a request until a request has finished."""

MAX_HELD_BACK = 16
"""Largest number of requests that wait for a prefix while others are admitted before them."""


class Admission:
    """The admission of requests whose whole prompts fit, with what running ones need next.

    :param shares_pool: whether activations share the pool, so a request may fit a step later.
    :ivar lacks_memory: whether a request was not admitted for lack of memory in the latest step.
    """

    def __init__(
        self,
        core: MemoryCore,
        limits: Limits,
        seats: RequestQueues,
        chunks: Chunks,
        *,
        shares_pool: bool,
        offloaded: OffloadedPrompts | None = None,
    ) -> None:
        self._core, self._limits, self._shares_pool = core, limits, shares_pool
        self._seats, self._chunks, self._offloaded = seats, chunks, offloaded
        self._alignment_tokens = {
            model: alignment_tokens([g for g in core.layout.groups if g.model == model])
            for model in {group.model for group in core.layout.groups}
        }
        self.outputs: dict[str, tuple[int, int]] = {}
        """By model, the number of finished requests and of their output tokens."""
        self.lacks_memory = False
        self._turned_away: Request | None = None
        self._made_way_in_vain: Request | None = None

    def clear(self) -> None:
        self.lacks_memory = False
        self._turned_away = self._made_way_in_vain = None

    def admit(self, draft: PlanDraft) -> None:
        """Admit waiting requests in turn; those that are held or wait for a prefix are passed
        over."""
        self.lacks_memory = False
        passed_over: list[Request] = []
        full_tenants = set[str]()  # those that have had their part of the step's prompt tokens
        last: Request | None = None
        num_held_back = 0
        while num_held_back < MAX_HELD_BACK and self._may_admit(draft):
            request = self._seats.waiting.first(but=full_tenants)
            if request is None:
                break
            if self._chunks.prompt_budget(draft, request) <= 0:
                full_tenants.add(request.turn.tenant)
                continue
            self._seats.waiting.take(request)
            if request.request_id in self._seats.held:
                passed_over.append(request)
            elif self._waits_for_prefix(request):
                passed_over.append(request)
                num_held_back += 1
            elif not (
                (self._has_seats(draft) and self._admit_one(request, draft))
                or self._admit_ahead(request, draft)
            ):
                self._seats.waiting.put_back([request])
                last = request
                break
        self._seats.waiting.put_back(passed_over)
        self._make_way(draft, last)

    def _make_way(self, draft: PlanDraft, last: Request | None) -> None:
        """Preempt a request of a tenant above its share for one of a tenant below (:mod:`.shares`).

        With parking, prompts displace decodes in another way.

        :param last: the request that was not admitted; None: the first that waits.
        """
        held_tenants = set[str]()
        head = last or self._seats.waiting.first()
        while head is not None and head.request_id in self._seats.held:
            held_tenants.add(head.turn.tenant)
            head = self._seats.waiting.first(but=held_tenants)
        if head is None or self._seats.parking is not None:
            return
        lacks_seat = len(self._seats.wanting()) >= self._limits.max_num_seqs
        if not (lacks_seat or self.lacks_memory or self._seats.runs_alone()):
            return  # it waits for tokens of a step, or for a prefix
        before = [r for r in self._seats.running if r.request_id not in draft.admitted]
        victim = makes_way(head, before, for_seat=lacks_seat)
        if victim is None:
            return
        if self._seats.in_flight:
            self._chunks.must_settle = True
            return
        self._seats.preempt(victim, draft)

    def _may_admit(self, draft: PlanDraft) -> bool:
        if not self._seats.waiting or self._chunks.prompt_budget(draft) <= 0:
            return False
        if self._seats.parking is None:
            return self._has_seats(draft)
        parked = self._seats.parking.parked
        is_held = bool(parked) and parked[0].request_id in self._seats.held
        comes_first = self._seats.parking.comes_first and not is_held
        return not comes_first and not self._seats.runs_alone()

    def _has_seats(self, draft: PlanDraft) -> bool:
        free_seats = self._limits.max_num_seqs - self._seats.num_wanting
        return draft.budget > 0 and free_seats > 0 and not self._seats.runs_alone()

    def unpark(self, draft: PlanDraft) -> None:
        """Readmit parked decodes before any prompt, each with its fetch, in order of arrival."""
        parking = self._seats.parking
        while parking is not None and self._has_seats(draft):
            ready = (r for r in parking.parked if r.request_id not in self._seats.held)
            request = next(ready, None)
            room_tokens = ROOM_TOKENS if self._seats.running else 0
            if request is None or not self._admit_one(request, draft, room_tokens):
                return
            parking.leave(request)

    def _admit_ahead(self, request: Request, draft: PlanDraft) -> bool:
        """Park decodes in the CPU buffer so that the request's prompt is admitted, or compute the
        prompt into the buffer, whichever moves fewer bytes."""
        if self._seats.parking is None or self._seats.is_swapped(request):
            return False
        if request is self._made_way_in_vain or self._chunks.prompt_budget(draft, parks=True) <= 0:
            return False
        leaving = self._seats.parking.give_way(request, self._seats.running, draft.admitted)
        offloaded = self._offloaded if self._has_seats(draft) else None
        if offloaded is not None and offloaded.pays(request, leaving):
            return self._begin_offloaded(offloaded, request, draft)
        if leaving and self._seats.in_flight:
            self._chunks.must_settle = True
            return False
        for other in leaving:
            self._seats.park(other, draft)
            if self._admit_one(request, draft):
                return True
            # Not again until a request ends: else decodes would be copied out and back in vain.
            self._made_way_in_vain = request
        return False

    def _begin_offloaded(
        self, offloaded: OffloadedPrompts, request: Request, draft: PlanDraft
    ) -> bool:
        """Compute the request's prompt into the CPU buffer; return whether that begins now."""
        offloaded.begin(request, draft)
        if not self._chunks.plan_chunk(request, draft):
            offloaded.give_up(request, draft)
            return False
        self._note_entered(request, draft)
        if request.cached_tokens is None:
            request.cached_tokens = 0
        return True

    def _admit_one(self, request: Request, draft: PlanDraft, room_tokens: int = 0) -> bool:
        """Admit the request if it fits; return whether it was admitted.

        :param room_tokens: tokens of room for every request, beyond what the next step needs.
        """
        self.lacks_memory = True  # unless it is admitted
        if self._seats.running and request is self._turned_away and not self._core.may_fit():
            return False
        request.choose_table()
        tokens = request.tokens(0, request.num_tokens)
        if request.runs_alone:
            self._chunks.protected.yield_all()
        remote = kept = request.remote_tokens
        if kept and self.count_cached(request) >= kept:
            kept = 0  # it is cached here too
        handle = self._core.open(
            tokens,
            kept_root(f"{request.number}/{request.preemptions}") if kept else self._root(request),
            reuse=not request.runs_alone,
            images=request.images,
            prompt_tokens=len(request.prompt),
            model=request.model,
        )
        request.handle = handle
        request.computed = self._core.hit_tokens(handle)
        request.found_tokens = request.computed
        request.remote_tokens = kept
        if kept:
            request.computed = kept
        if self._seats.swapping is not None:
            self._seats.swapping.resume(request)
        if kept:
            if request.computed == kept:  # else the saved pages are received with these
                self._core.receive(handle, kept)
            self._core.send_away(handle, kept)
        request.settled = request.computed
        if self._fits(request, draft, room_tokens) and self._start(request, draft):
            return True
        self._core.close(handle, renew=False)
        request.handle = NO_HANDLE
        request.computed = request.settled = request.repeats = 0
        request.remote_tokens = remote
        asks_again = self._shares_pool or request.runs_alone or self._seats.is_swapped(request)
        self._turned_away = None if asks_again else request
        if not self._seats.running and self._chunks.protected.yield_all():
            return self._admit_one(request, draft)
        if self._seats.running or request.runs_alone or not self._chunks.memory.is_complete:
            return False
        request.runs_alone = True  # the cached pages that it would reuse block it
        return self._admit_one(request, draft)

    def enter_arrived(self, draft: PlanDraft) -> None:
        while self._seats.arrived and len(self._seats.running) < self._limits.max_num_seqs:
            if self._seats.runs_alone():
                return
            request = self._seats.arrived.popleft()
            self._claim(request)
            beyond = request.tokens(request.computed, request.num_tokens)
            self._core.append(np.full(len(beyond), request.handle, np.int32), beyond)
            draft.add_pages(self._core.held_pages(request.handle), [request.handle])
            request.state = RequestState.RUNNING
            self._seats.enter(request)
            draft.admitted.append(request.request_id)

    def has_room_for(self, handle: int, computed: int) -> bool:
        others = ints_of(request.handle for request in self._seats.running)
        until = ints_of(request.end_for_now + 1 for request in self._seats.running)
        return self._core.fits(handle, computed + 1, 1, others, until)

    def _claim(self, request: Request) -> None:
        expected_tokens = request.num_tokens + self.expected_output(request)
        will_return = request.sampling.will_return
        self._core.claim(request.handle, expected_tokens, will_return=will_return)

    def _start(self, request: Request, draft: PlanDraft) -> bool:
        self._claim(request)
        held = self._core.held_pages(request.handle)
        request.embedded = embedded_images(self._core.layout.groups, held, request.spec.images)
        if not self._chunks.plan_chunk(request, draft):
            return False
        draft.add_pages(held, [request.handle])
        if self._seats.swapping is not None:
            draft.fetch(self._seats.swapping.fetch(request, held))
        request.state = RequestState.RUNNING
        self._note_entered(request, draft)
        self._seats.enter(request)
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
            hit_tokens = self._core.hit_tokens(request.handle)
            request.group_hits = group_hits(
                self._core.layout.groups, request.model, held, hit_tokens
            )
            self._chunks.protected.on_admitted(
                request,
                self.expected_output(request),
                len(self._seats.running) + len(self._seats.waiting),
            )
        return True

    def _note_entered(self, request: Request, draft: PlanDraft) -> None:
        """Note that a request begins, and charge its party for the tokens that it computes."""
        request.entered_tokens = request.num_tokens - request.settled
        request.entered_output = request.num_output
        scored_tokens = len(request.prompt) if request.is_scored else 0  # each is reported
        self._seats.waiting.charge(request.request_id, request.entered_tokens + scored_tokens)
        self.lacks_memory = False
        draft.admitted.append(request.request_id)

    def _fits(self, request: Request, draft: PlanDraft, room_tokens: int) -> bool:
        """Return whether the whole remaining prompt fits, with what running requests need next.

        Of a prompt that is longer than the memory, only the local part must fit.
        """
        others = ints_of(r.handle for r in self._seats.running)
        until = ints_of(r.end_for_now + 1 + room_tokens for r in self._seats.running)
        chunk = min(request.remaining, self._limits.min_chunk_tokens)
        self._chunks.memory.before_admission(
            chunk, self._chunks.planned_tokens(draft), len(draft.work)
        )
        wanted = max(request.computed + 1, request.end_for_now) + room_tokens
        return self._core.fits(request.handle, wanted, chunk, others, until)

    def _waits_for_prefix(self, request: Request) -> bool:
        """Return whether a running request will soon publish more of this prompt than is cached."""
        has_waited = request.prefix_wait_steps >= self._limits.max_prefix_wait_steps
        if has_waited or self._seats.is_swapped(request):
            return False
        ahead = max(
            (self._shared_ahead(request, other) for other in self._seats.running), default=0
        )
        if not ahead or ahead <= max(request.remote_tokens, self.count_cached(request)):
            return False
        request.prefix_wait_steps += 1
        self._seats.rungs["wait_for_prefix"] += 1
        return True

    def count_cached(self, request: Request, *, prompt_alone: bool = False) -> int:
        """Return the number of a request's cached tokens, after which it could continue.

        :param prompt_alone: whether to look up its prompt without its output.
        """
        return self._core.peek(
            request.prompt if prompt_alone else request.tokens(0, request.num_tokens),
            self._root(request),
            images=request.images,
            prompt_tokens=len(request.prompt),
            model=request.model,
        )

    def _shared_ahead(self, request: Request, other: Request) -> int:
        """Return the length of the common prefix, or 0 if ``other`` has computed all of it."""
        is_apart = (other.model, other.cache_root) != (request.model, request.cache_root)
        if is_apart or other.settled >= len(other.prompt):
            return 0
        if self._chunks.drops(request) or self._chunks.drops(other):
            return 0
        shared = min(common_prefix(request.prompt, other.prompt), request.num_tokens - 1)
        shared -= shared % self._alignment_tokens[request.model]
        return shared if shared > other.settled else 0

    def _root(self, request: Request) -> str:
        """Return the cache root of a request's prefix.

        A request that drops tokens hits no prefix, since its last tokens must all be computed to
        choose what to keep; nothing is ever cached under the root of such requests.
        """
        if self._chunks.drops(request):
            return DROPPING_ROOT
        return request.cache_root

    def expected_output(self, request: Request) -> int:
        """Return how many more tokens a request will make, if its answer is of the usual length."""
        count, total = self.outputs.get(request.model, (0, 0))
        mean = total // count if count else INITIAL_EXPECTED_OUTPUT
        return max(1, min(request.max_tokens, mean) - len(request.output))

    def note_end(self, request: Request) -> None:
        self._made_way_in_vain = None
        if request.spec.pooling:
            return  # it has no answer
        count, total = self.outputs.get(request.model, (0, 0))
        self.outputs[request.model] = (count + 1, total + len(request.output))
