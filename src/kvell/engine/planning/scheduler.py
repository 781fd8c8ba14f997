"""The scheduler: requests and memory in, a step plan out.

Pure: no clock, no I/O, no torch.  One step is planned as

1. decodes, in order of admission; when memory runs out a running request of the tenant
   that holds most is preempted (:mod:`kvell.engine.planning.request_queues`);
2. prefill chunks in order of admission, each as large as the token budget and
   the memory allow;
3. admissions in turn (:mod:`kvell.engine.requests.turns`), none in a step that
   preempted: a request is admitted when its whole remaining prompt fits, with what
   the running ones still need; a request of a tenant that holds more may be preempted
   for one of a tenant that holds less;
4. draft tokens (:mod:`kvell.engine.planning.chunks`), with the rest of the budget.

Without chunked prefill (:mod:`kvell.engine.planning.whole_prompts`) 2 and 3 come first, and 1
only in a step without them.

Prefixes that several requests share may be protected (:mod:`kvell.engine.planning.protected`).
Protection is given up before a request is preempted or deferred, and before a request waits while
none runs.

A request that runs out of pages while no other runs is blocked by its own pages, which are
scattered over large pages.  It starts again from nothing and runs alone, for which the contract's
page counts (:mod:`kvell.prefix.groups.capacity`) guarantee enough pages.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.admission import Admission
from kvell.engine.planning.chunks import TEXT_KINDS, Chunks, OffloadedPrompts
from kvell.engine.planning.plan_draft import PlanDraft
from kvell.engine.planning.request_queues import RequestQueues
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.planning.whole_prompts import require_whole_prompts
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import PageCopy, StepPlan, TokenWork
from kvell.engine.requests.request import Request
from kvell.memory import Layout, MemoryCore
from kvell.vocabulary import RequestId, StepNumber

MOST_DEPTH = 1


class Fences:
    """The steps after which nothing is planned before their result.

    They are those that sample where draft tokens may follow, since the number of right ones is not
    known; and those with a prompt's tokens where the result decides which pages are kept: states,
    pages of images and of budgets.

    ::

        depth 0   plan 1 ─ run 1 ─ commit 1 ─ plan 2 ─ run 2 ─ commit 2 ─ …
        depth 1   plan 1 ─ run 1 ──────────┬─ run 2 ──────────────────┬─ run 3 …
                           plan 2          └─ commit 1 ─ plan 3       └─ commit 2 ─ plan 4

    Plan n+1 is made without the ends and the tokens of step n; the runner fills the tokens in.
    Steps run in order, so a plan may use pages, chunks and buffer pages that the previous step
    still reads.  If a plan depends on more of a step's result, it is made when the result is
    committed (a fence).
    """

    def __init__(self, limits: Limits, layout: Layout) -> None:
        self._has_drafts = limits.num_speculative_tokens > 0
        self._models = {
            group.model
            for group in layout.groups
            if group.kind not in TEXT_KINDS or group.counts_images or group.holds_embeddings
        }
        self.is_needed = limits.depth > 0 and (self._has_drafts or bool(self._models))

    def is_after(self, works: Iterable[TokenWork]) -> bool:
        return self.is_needed and any(
            (self._has_drafts and work.samples)
            or (
                work.spec.model in self._models
                and not (work.samples and work.known == 1 and work.output_index > 0)  # a decode
            )
            for work in works
        )


def with_depth(limits: Limits, is_wanted: bool | None, *, default: bool) -> tuple[Limits, str]:
    """Return the limits with the depth to use, and its description in the startup message.

    :param is_wanted: whether to plan ahead; None: ``default``.
    """
    is_ahead = default if is_wanted is None else is_wanted
    steps = "each is planned while the previous step runs"
    if limits.num_speculative_tokens:
        steps += ", except after steps that may have draft tokens"
    return replace(limits, depth=MOST_DEPTH * is_ahead), steps if is_ahead else ""


COMPACT_LARGE_PAGES = 4
"""Largest number of large pages into which one step gathers scattered pages."""


class Scheduler:
    """The planner of steps for the requests over one memory core.

    It has three layers, each over the previous one: seats (the requests that run), chunks (their
    work), admission.

    :ivar steps_put_off: number of latest consecutive steps that had work, but no memory for it.
    """

    def __init__(
        self,
        core: MemoryCore,
        limits: Limits,
        memory: StepMemory | None = None,
        swapping: Swapping | None = None,
        parking: Parking | None = None,
        buffer_large: int | None = None,
    ) -> None:
        """:param swapping: the CPU buffer; None if preempted requests lose what they computed.
        :param parking: over ``swapping``; None if prompts never displace decodes.
        :param buffer_large: number of the buffer's first large page, counted from the pool's first,
            if passes and other instances can use it there."""
        shares_pool = memory is not None
        require_whole_prompts(limits, shares_pool=shares_pool, parks=parking is not None)
        self.limits, self.swapping, self.parking = limits, swapping, parking
        self.buffer_large = buffer_large
        self.steps_put_off = 0
        self._preempted = False
        self._core = core
        self.seats = RequestQueues(core, limits, swapping, parking)
        self.chunks = Chunks(core, limits, self.seats, memory)
        self._fences = Fences(limits, core.layout)
        self.offloaded: OffloadedPrompts | None = None
        if swapping is not None and parking is not None and buffer_large is not None:
            self.offloaded = OffloadedPrompts(core, self.seats, swapping, parking, buffer_large)
        self.admission = Admission(
            core,
            limits,
            self.seats,
            self.chunks,
            shares_pool=shares_pool,
            offloaded=self.offloaded,
        )

    def sent_places(self, request: Request) -> Mapping[tuple[int, int], int] | None:
        """Return (group, position) → page of a request that another instance reads in the CPU
        buffer, counted like those of the pool; None if it is not there."""
        if self.buffer_large is None or self.swapping is None or not self.swapping.has(request):
            return None
        return self.swapping.send(request, self.buffer_large)

    def can_leave_buffer(self, request: Request) -> bool:
        if self.buffer_large is None or self.swapping is None or not self.swapping.has(request):
            return False
        return self.swapping.decodes(request)

    def finish(self, request: Request) -> None:
        self.seats.finish(request)
        self.chunks.note_answered(request.turn.tenant)
        self.admission.note_end(request)

    def drop_reserves(self) -> None:
        self.chunks.protected.yield_all()
        if self.swapping is not None:
            self.swapping.drop_prefixes()

    def clear(self, closed: Sequence[int]) -> None:
        """Forget all requests, in whatever state an exception has left them."""
        self.seats.clear(closed)
        self.admission.clear()
        self.steps_put_off = 0
        self._preempted = False

    def plan(
        self,
        step: StepNumber,
        in_flight: int = 0,
        held: Collection[RequestId] = (),
        shared_prompt_tokens: int | None = None,
        undrafted: Collection[RequestId] = (),
    ) -> StepPlan:
        """Plan step ``step``: its pages are allocated, nothing is computed yet."""
        self.seats.in_flight, self.seats.held = in_flight, held
        self.chunks.begin_step(step, shared_prompt_tokens)
        self._core.begin_step(step)
        self.chunks.memory.begin(step, step - 1 - in_flight)
        if self.swapping is not None:
            self.swapping.begin()
        if self.parking is not None:
            self.parking.begin(step)
        if self.limits.common_pool:
            self.chunks.protected.renew(self.seats.running)
        draft = PlanDraft(self.limits.max_num_batched_tokens)
        if self.swapping is not None:
            draft.offload(self.swapping.copy_out(self.wanted_large()))
        if self.offloaded is not None:
            self.offloaded.park_computed()
        self.seats.start_again_long()
        if self.seats.arrived:
            self.admission.enter_arrived(draft)
        self._plan_running(draft)
        if not draft.preempted and not self.chunks.must_settle:
            if self.parking is not None:
                self.admission.unpark(draft)
            self.admission.admit(draft)
        if not self.limits.enable_chunked_prefill and not draft.work:
            self.chunks.plan_decodes(draft)
        self._unstick(draft)
        self.chunks.plan_draft_tokens(draft, undrafted)
        self._grant(step, draft)
        self._preempted = bool(draft.preempted)
        released = self.seats.take_released()
        checkpoints = self.chunks.checkpoints(draft)
        if self._fences.is_needed:
            self.chunks.must_settle |= self._fences.is_after(draft.work)
        draft.add_moved(self._core.compact(COMPACT_LARGE_PAGES))
        copies = [row for row in self._core.copies().tolist() if row[0] not in draft.forgotten]
        return StepPlan(
            step,
            released=released,
            offloads=draft.offloads,
            fetches=draft.fetches,
            copies=tuple(PageCopy(*row[1:]) for row in copies),  # copy-on-write
            new_pages=draft.new_pages(),
            work=tuple(draft.work),
            checkpoints=checkpoints,
            preempted=tuple(draft.preempted),
            parked=tuple(draft.parked),
            admitted=tuple(draft.admitted),
            slot=self.chunks.memory.slot,
            pools=draft.has_pooled,
        )

    @property
    def may_plan_ahead(self) -> bool:
        """Whether there is anything to plan before the results of steps in flight arrive.

        False while memory is short: no request is preempted or deferred for lack of pages that a
        result may free.  Also False after a fence (:class:`.Fences`), and while the sampling of a
        request needs its latest token.
        """
        if self.chunks.must_settle or any(
            request.sampling.looks_back for request in self.seats.running
        ):
            return False
        return (
            bool(self.seats.waiting)
            or any(
                request.wants_work and self.seats.may_run(request) and not request.outgrows_table
                for request in self.seats.running
            )
            or any(
                request.wants_work and not request.is_decoding for request in self.seats.offloaded
            )
        )

    def lacks_memory(self, plan: StepPlan) -> bool:
        return bool(plan.preempted) or self.admission.lacks_memory

    def wants_memory(self) -> bool:
        return self.admission.lacks_memory and bool(self.seats.waiting)

    @property
    def num_awaiting_memory(self) -> int:
        """Number of requests that more memory would admit; at most one for each free seat."""
        parked = len(self.parking.parked) if self.parking else 0
        if not (parked or self._preempted or self.admission.lacks_memory):
            return 0
        free_seats = self.limits.max_num_seqs - len(self.seats.wanting())
        return max(0, min(free_seats, parked + len(self.seats.waiting)))

    def _grant(self, step: StepNumber, draft: PlanDraft) -> None:
        """Get activations for the whole step; work that the device refuses is deferred."""
        planned = len(draft.work)
        while not self.chunks.memory.grant_activations(
            step, self.chunks.planned_tokens(draft), draft.num_logits
        ):
            # The request of the work that was planned last keeps its new pages.
            draft.budget += draft.work.pop().count
        self.steps_put_off = 0 if draft.work or not planned else self.steps_put_off + 1

    def _plan_running(self, draft: PlanDraft) -> None:
        if self.limits.enable_chunked_prefill:
            self.chunks.plan_decodes(draft)
        self.chunks.plan_prefills(draft)
        if self.seats.offloaded:
            self.chunks.plan_offloaded(draft)

    def _unstick(self, draft: PlanDraft) -> None:
        """Preempt requests one by one while running requests block each other for lack of pages.

        Requests that are held, or wait until more of their sections are remote, block no others.
        """
        if self.seats.in_flight:
            self.chunks.must_settle |= not draft.work
            return
        while not draft.work and any(map(self.seats.may_run, self.seats.running)):
            self.seats.preempt_one(draft)
            self.chunks.plan_decodes(draft)
            if self.limits.enable_chunked_prefill or not draft.work:
                self.chunks.plan_prefills(draft)

    def looks_up(self, request: Request) -> bool:
        is_own = request.is_scored or not self.limits.enable_prefix_caching
        return not (is_own or request.runs_alone or self.chunks.drops(request))

    def cached_prompt_tokens(self, request: Request) -> int:
        return self.admission.count_cached(request, prompt_alone=True)

    def wanted_large(self) -> int:
        """Return the most large pages that the first waiting request will need."""
        first = self.seats.waiting.first()
        if first is None:
            return 0
        return sum(
            -(-first.num_tokens // (group.page_tokens * group.pages_per_large))
            for group in self._core.layout.groups
            if group.model == first.model and group.kind.counts_tokens
        )
