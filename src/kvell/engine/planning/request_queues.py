"""Seats and queues: requests wait, run, are preempted, parked and ended; pure."""

from collections import Counter, deque
from collections.abc import Collection, Sequence

from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.plan_draft import PlanDraft
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.request import NO_HANDLE, Request, RequestState
from kvell.engine.requests.turns import TurnQueue
from kvell.memory import MemoryCore
from kvell.vocabulary import RequestId

PROMPT_TOKENS_PER_MADE = 8
"""Number of prompt tokens that take about as long as one output token."""


def gives_way(running: Sequence[Request]) -> Request:
    """Return the request to preempt: the youngest one of the tenant that holds most tokens.

    The oldest request is preempted last, so that at least one always finishes.  So are requests
    that borrow memory (Infinite-LLM: their remote sections would be recomputed).
    """
    local = [request for request in running if not request.borrows]
    if not local:
        return running[-1]
    held = _held_tokens(running)
    young = [request for request in local if request is not running[0]] or local
    return _youngest_of_largest(young, held)


def makes_way(head: Request, running: Sequence[Request], *, for_seat: bool) -> Request | None:
    """Return the request to preempt for the waiting request ``head``; None if ``head`` must wait.

    The tenant of the preempted request holds more seats or tokens than the tenant of ``head`` would
    then: so both come to hold the same, and neither takes back what it gave.  The request is not
    more urgent, and has made enough since its admission to have been worth its start.  The last
    does not matter if the tenant of ``head`` holds nothing: a long prompt would keep it out for as
    long as it takes.  Only the oldest request may finish its prompt then, so that one always does.
    """
    held = Counter(r.turn.tenant for r in running) if for_seat else _held_tokens(running)
    is_newcomer = not held[head.turn.tenant]
    then = held[head.turn.tenant] + (1 if for_seat else head.num_tokens)
    fit = [
        request
        for request in running
        if held[request.turn.tenant] > then
        and request.turn.priority >= head.turn.priority
        and not request.borrows
        and (_was_worth_its_start(request) or (is_newcomer and request is not running[0]))
    ]
    return _youngest_of_largest(fit, held) if fit else None


def _was_worth_its_start(request: Request) -> bool:
    """Return whether a request's output took at least as long as the tokens computed before it."""
    made = request.num_output - request.entered_output
    return made > 0 and PROMPT_TOKENS_PER_MADE * made >= request.entered_tokens


def _youngest_of_largest(requests: Sequence[Request], held: Counter[str]) -> Request:
    return max(enumerate(requests), key=lambda item: (held[item[1].turn.tenant], item[0]))[1]


def _held_tokens(running: Sequence[Request]) -> Counter[str]:
    held: Counter[str] = Counter()
    for request in running:
        held[request.turn.tenant] += request.num_tokens
    return held


class RequestQueues:
    """The queues of requests over one memory core, and the requests that run.

    :ivar running: requests that hold pages and are in steps; the first one is preempted last.
    :ivar offloaded: requests whose prompts are computed into the CPU buffer.
    :ivar arrived: requests that came from other instances, with pages, and have no seat yet.
    :ivar held: requests that have no part in the step that is being planned.
    :ivar rungs: number of uses of each remedy for short memory, by its name.
    """

    def __init__(
        self,
        core: MemoryCore,
        limits: Limits,
        swapping: Swapping | None = None,
        parking: Parking | None = None,
    ) -> None:
        """:param swapping: the CPU buffer; None if preempted requests lose what they computed.
        :param parking: over ``swapping``; None if prompts never displace decodes."""
        self.swapping, self.parking = swapping, parking
        self.waiting: TurnQueue[Request] = TurnQueue()
        self.arrived: deque[Request] = deque()
        self.running: list[Request] = []
        self.offloaded: list[Request] = []
        self.in_flight = 0
        self.held: Collection[RequestId] = ()
        self.rungs = dict.fromkeys(("shrink_chunk", "defer", "wait_for_prefix", "preempt"), 0)
        self._core, self._limits = core, limits
        self._released: list[int] = []

    def wanting(self) -> list[Request]:
        """Return the running requests with tokens to compute; all if no step is in flight."""
        return [r for r in self.running if r.wants_work] if self.in_flight else self.running

    def may_run(self, request: Request) -> bool:
        """Return whether a request is neither held nor waits for further remote sections."""
        return not request.is_held_up and request.request_id not in self.held

    @property
    def num_wanting(self) -> int:
        """Number of seats that are taken by requests with tokens to compute, this step included."""
        return len(self.wanting()) + len(self.offloaded)

    def is_swapped(self, request: Request) -> bool:
        return self.swapping is not None and self.swapping.has(request)

    def runs_alone(self) -> bool:
        return any(request.runs_alone for request in self.running)

    def enter(self, request: Request) -> None:
        """Insert the request into ``running``, in order of admission; with parking, of arrival."""
        place = len(self.running)
        while (
            self.parking is not None and place and self.running[place - 1].number > request.number
        ):
            place -= 1
        self.running.insert(place, request)

    def lift(self, request: Request) -> None:
        """Take a running request out of the steps, or one in the CPU buffer out of those that will
        be resumed; its pages stay."""
        if self.swapping is not None and self.swapping.has(request):
            saved = self.swapping.saved(request)
            request.computed = request.settled = saved.computed
            request.repeats = saved.repeats
            self.waiting.discard(request)
            if self.parking is not None:
                self.parking.lift(request)
        else:
            self.running.remove(request)
        request.state = RequestState.MOVING

    def go_on(self, request: Request) -> None:
        if self.is_swapped(request):
            _let_wait(request)
            if self.parking is None:
                self.waiting.put_back([request])
            else:
                self.parking.add(request)
            return
        if len(self.running) < self._limits.max_num_seqs:
            request.state = RequestState.RUNNING
            self.enter(request)
            return
        self._close(request, returns=True)
        _let_wait(request)
        self.waiting.put_back([request])

    def finish(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._leave_cached(request)
        elif request.state is RequestState.OFFLOADED:
            self.leave_buffer(request)
        elif request.state is RequestState.MOVING or request in self.arrived:
            if request in self.arrived:
                self.arrived.remove(request)
            if request.handle != NO_HANDLE:  # else its pages are in the CPU buffer
                self._leave_cached(request)
        self.waiting.discard(request)
        if self.swapping is not None:
            self.swapping.forget(request)
        if self.parking is not None:
            self.parking.leave(request)
        request.state = RequestState.FINISHED

    def leave_buffer(self, request: Request) -> None:
        """Take a request out of those that are computed into the CPU buffer; it is waiting."""
        self.offloaded.remove(request)
        self._core.close(request.handle, renew=False)
        self._released.append(request.handle)
        request.handle = NO_HANDLE
        request.state = RequestState.WAITING
        request.computed = request.settled = 0

    def preempt_one(self, draft: PlanDraft) -> Request:
        """Preempt and return the request that must free memory (:mod:`.shares`)."""
        victim = gives_way(self.running)
        victim.runs_alone |= len(self.running) == 1
        return self.preempt(victim, draft)

    def preempt(self, victim: Request, draft: PlanDraft) -> Request:
        """Preempt a running request: its pages are freed, maybe copied to the CPU buffer."""
        self.running.remove(victim)
        size_bytes = 0
        if self.swapping is not None:
            size_bytes = self.swapping.size_bytes(victim)
            draft.offload(self.swapping.save(victim))
        self._give_up(victim, draft)
        victim.preemptions += 1
        if self.parking is not None and self.is_swapped(victim):
            self.parking.park(victim, size_bytes, gave_way=False)
            draft.parked.append(victim.request_id)
        else:
            self.waiting.put_back([victim])
        draft.preempted.append(victim.request_id)
        self.rungs["preempt"] += 1
        return victim

    def _give_up(self, request: Request, draft: PlanDraft) -> None:
        draft.forget(request)
        self._close(request, returns=True)
        _let_wait(request)

    def park(self, request: Request, draft: PlanDraft) -> None:
        assert self.parking is not None and self.swapping is not None
        size_bytes = self.swapping.size_bytes(request)
        self.running.remove(request)
        draft.offload(self.swapping.save(request, asks=False))
        self._give_up(request, draft)
        self.parking.park(request, size_bytes)
        draft.parked.append(request.request_id)

    def start_again_long(self) -> None:
        """Let requests that outgrew the short rotation table recompute all under the long one.

        A request in a step in flight waits for its result.
        """
        for request in [r for r in (*self.running, *self.arrived) if r.outgrows_table]:
            if request.settled == request.computed and not request.drawing:
                self.start_again(request)
                request.choose_table()

    def start_again(self, request: Request) -> None:
        """Let a request that has pages recompute all of its tokens, when its turn comes."""
        (self.arrived if request in self.arrived else self.running).remove(request)
        self._close(request, returns=True)
        _let_wait(request)
        request.is_spoiled = False
        request.preemptions += 1
        self.waiting.put_back([request])

    def take_released(self) -> tuple[int, ...]:
        released = tuple(self._released)
        self._released = []
        return released

    def clear(self, closed: Sequence[int]) -> None:
        """Forget all requests, in whatever state an exception has left them."""
        self.waiting = TurnQueue()
        self.running = []
        self.offloaded = []
        self.arrived.clear()
        if self.parking is not None:
            self.parking.clear()
        if self.swapping is not None:
            self.swapping.clear()
        self._released += closed

    def _leave_cached(self, request: Request) -> None:
        """Close an ended request, whose pages the CPU buffer may keep once they are cached."""
        if self.swapping is not None and not request.is_spoiled:
            self.swapping.on_ended(request)
        self._close(request)

    def _close(self, request: Request, *, returns: bool = False) -> None:
        self._core.close(request.handle, renew=not request.is_spoiled, returns=returns)
        self._released.append(request.handle)
        request.handle = NO_HANDLE
        request.remote_tokens = 0


def _let_wait(request: Request) -> None:
    request.state = RequestState.WAITING
    request.computed = request.settled = request.repeats = 0
