"""Masks of running answers, computed by several workers, so that no step waits for a slow grammar.

::

    follow ──► quick lane: one worker ──── mask ──► ready: the answer's row may be planned
                  │ a mask takes more than 20 ms
                  └──► slow lanes: workers of low priority ──► ready, or given up

Masks after draft tokens are computed in the quick lane alone, while the step computes that verifies
these: a row without such a mask draws no further token in this step.

Each lane is a thread with one worker.  Tenants take turns in a lane, and are charged for the
processor time of their masks.  A grammar whose masks are slow, and all grammars of a tenant with
several such, begin in a slow lane.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from threading import Condition
from time import monotonic

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.turns import Turn, TurnQueue
from kvell.engine.sampling.grammar_process.checking import TOO_COMPLEX, GrammarChecks, Verdict
from kvell.engine.sampling.grammar_process.masking import (
    QUICK,
    SLOW,
    Found,
    MaskJob,
    MaskWorker,
    OutputTokens,
    Trouble,
    WorkerLimits,
)
from kvell.engine.sampling.grammar_process.messages import DraftMasks, Mask
from kvell.engine.sampling.grammar_process.processes import GrammarProcesses
from kvell.vocabulary import RequestId

Allowed = npt.NDArray[np.bool_]
SLOW_LANES = 2
MASK_ROOM_BYTES = QUICK.room_bytes + SLOW_LANES * SLOW.room_bytes
"""Memory of all workers of a model that compute masks, beyond the template's."""
QUICK_COMPILE_SECONDS = 0.25
"""A grammar that takes longer to compile begins in a slow lane."""
ANSWER_SECONDS = 10.0
"""The most processor time for the masks of an answer, and further time for each of its tokens."""
TOKEN_SECONDS = 0.01
MOST_STRIKES = 3
"""The slow grammars that a tenant may begin in the quick lane, and the time to forget one."""
STRIKE_SECONDS = 15.0
MOST_BATCHED = 64
"""The most answers that a quick lane sends to its worker together."""
MOST_DRAFTED = 8
"""The most of them that need masks after draft tokens."""
KNOWN_TENANTS = 1024


@dataclass(frozen=True)
class MaskedRequest:
    """A request that draws a token under a grammar.

    :param output: output tokens so far; the list may grow afterwards.
    :param attempt: number of the attempt, which has an output of its own; None: the latest one.
    """

    request_id: RequestId
    asked: StructuredOutputs
    output: OutputTokens
    tenant: str = ""
    attempt: int | None = None
    drafts: tuple[int, ...] = ()


@dataclass(eq=False)
class _Answer:
    """An answer under a grammar, and its mask for the token after ``length`` tokens.

    :ivar is_ready: whether ``allowed`` is that mask.
    :ivar binds: False if any token is allowed; else ``allowed`` has the tokens, None for none.
    :ivar seconds: the processor time of its masks so far.
    :ivar drafts: draft tokens after its ``length`` tokens, whose masks are needed.
    :ivar drafted: the masks after each of them, maybe not after all; None in it allows any token.
        None until they are computed.
    :ivar draft_seconds: the processor time of masks after draft tokens so far.
    """

    number: int
    asked: StructuredOutputs
    turn: Turn
    attempt: int | None
    output: OutputTokens
    length: int
    compile_seconds: float
    lane: "_Lane"
    is_ready: bool = False
    binds: bool = True
    allowed: Allowed | None = None
    seconds: float = 0.0
    job: MaskJob | None = None
    drafts: tuple[int, ...] = ()
    drafted: tuple[Allowed | None, ...] | None = None
    draft_seconds: float = 0.0
    request_id: RequestId = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = RequestId(str(self.number))

    def end(self, allowed: Allowed | None, *, binds: bool = True) -> None:
        self.is_ready = True
        self.allowed = allowed
        self.binds = binds

    def begin(self) -> MaskJob:
        """Return the work for its mask, or for those after its draft tokens."""
        parts = (self.number, self.asked, self.output, self.length, self.compile_seconds)
        self.job = MaskJob(*parts, self.drafts)
        return self.job

    def await_mask(self, length: int) -> None:
        """Note that the mask after ``length`` tokens is needed now."""
        self.length = length
        self.is_ready = False
        self.drop_drafts()

    def drop_drafts(self) -> None:
        self.drafts = ()
        self.drafted = None

    def has_time(self, seconds: float) -> bool:
        return seconds <= ANSWER_SECONDS + TOKEN_SECONDS * self.length

    def leave(self) -> None:
        """Leave its lane, without masks for its draft tokens."""
        self.drop_drafts()
        self.lane.drop(self)
        self.lane.gone.append(self.number)
        if self.job is not None:
            self.job.is_dropped = True


class _Lane:
    """One worker, its thread and the answers that wait for it.

    :ivar awaited: numbers of the answers that wait for a mask, or whose mask is being computed.
    :ivar gone: numbers of the answers that the worker may forget.
    """

    def __init__(self, processes: GrammarProcesses, limits: WorkerLimits, batched: int) -> None:
        self.worker = MaskWorker(processes, limits)
        self.batched = batched
        self.line: TurnQueue[_Answer] = TurnQueue()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-masks")
        self.awaited: set[int] = set()
        self.gone: list[int] = []

    def add(self, answer: _Answer) -> None:
        self.line.add(answer)
        self.awaited.add(answer.number)

    def drop(self, answer: _Answer) -> None:
        self.line.discard(answer)
        self.awaited.discard(answer.number)

    def take(self) -> tuple[list[_Answer], list[int]]:
        """Return the answers whose turn it is, and the numbers of answers that have ended.

        Those with draft tokens are few and come last, so that others do not wait long for them.
        """
        batch = list[_Answer]()
        while len(batch) < self.batched and (answer := self.line.first()) is not None:
            if sum(other.is_ready for other in batch) == MOST_DRAFTED:
                break
            self.line.take(answer)
            batch.append(answer)
        batch.sort(key=lambda answer: answer.is_ready)
        gone, self.gone = self.gone, []
        return batch, gone


class AnswerMasks:
    """The masks of one model's answers.

    :param checks: verdicts on grammars; a grammar that ends a worker is added as too complex.
    """

    def __init__(
        self,
        processes: GrammarProcesses,
        checks: GrammarChecks,
        read: Callable[[Mask, int], Allowed | None],
    ) -> None:
        self._checks, self._read = checks, read
        self._changed = Condition()
        self._answers: dict[RequestId, _Answer] = {}
        self._numbers = count()
        self._quick = _Lane(processes, QUICK, MOST_BATCHED)
        self._slow = [_Lane(processes, SLOW, 1) for _ in range(SLOW_LANES)]
        self._strikes: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._ring: Callable[[], None] | None = None

    def follow(self, requests: Iterable[MaskedRequest]) -> None:
        """Begin to compute the masks that these requests need next; forget all others."""
        with self._changed:
            followed = {self._follow(request) for request in requests}
            self.forget(self._answers.keys() - followed)

    def ask(self, requests: Iterable[MaskedRequest]) -> None:
        with self._changed:
            for request in requests:
                self._follow(request)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        with self._changed:
            for request_id in request_ids:
                if (answer := self._answers.pop(request_id, None)) is not None:
                    answer.leave()

    def late(
        self, request_ids: Iterable[RequestId], ring: Callable[[], None]
    ) -> frozenset[RequestId]:
        """Return the requests whose masks are not ready.

        :param ring: called from another thread when the first of them is.
        """
        with self._changed:
            late = frozenset(name for name in request_ids if not self._answers[name].is_ready)
            self._ring = ring if late else None
        return late

    def wait_quick(self, seconds: float) -> None:
        """Wait until all masks of the quick lane are ready, at most for ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._quick.awaited, seconds)

    def wait(self, request_ids: Sequence[RequestId]) -> dict[RequestId, Allowed | None]:
        """Wait for masks; return the allowed tokens of the answers that may not have any token.

        The value is bool [vocabulary], or None if the answer cannot continue.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: all(self._answers[name].is_ready for name in request_ids)
            )
            answers = {name: self._answers[name] for name in request_ids}
        return {name: answer.allowed for name, answer in answers.items() if answer.binds}

    def are_ready(self, request_ids: Iterable[RequestId]) -> bool:
        with self._changed:
            return all(self._answers[name].is_ready for name in request_ids)

    def ask_drafts(self, requests: Iterable[MaskedRequest]) -> None:
        """Begin to compute the masks after draft tokens of requests, if their own are ready."""
        with self._changed:
            for request in requests:
                answer = self._answers[request.request_id]
                may_draft = answer.is_ready and self._may_draft(answer)
                answer.drafts = request.drafts if may_draft else ()
                answer.drafted = None
                if answer.drafts:
                    self._enqueue(answer)

    def draft_masks(
        self, request_ids: Iterable[RequestId], seconds: float
    ) -> dict[RequestId, tuple[Allowed | None, ...]]:
        """Return the allowed tokens after each draft token, as far as they are known in time.

        :returns: for each draft token bool [vocabulary]; None if any token may follow.
        """
        with self._changed:
            answers = {name: self._answers[name] for name in request_ids if name in self._answers}
            self._changed.wait_for(
                lambda: all(a.drafted is not None or not a.drafts for a in answers.values()),
                seconds,
            )
            return {name: answer.drafted or () for name, answer in answers.items()}

    def find_undrafted(self, request_ids: Iterable[RequestId]) -> frozenset[RequestId]:
        """Return the requests whose draft tokens would get no masks."""
        with self._changed:
            return frozenset(
                name for name in request_ids if not self._may_draft(self._answers[name])
            )

    def _may_draft(self, answer: _Answer) -> bool:
        return answer.lane is self._quick and answer.has_time(answer.draft_seconds)

    def close(self) -> None:
        for lane in (self._quick, *self._slow):
            lane.thread.shutdown(wait=False, cancel_futures=True)

    def _follow(self, request: MaskedRequest) -> RequestId:
        answer = self._answers.get(request.request_id)
        length = len(request.output)
        is_same = answer is not None and request.attempt in (None, answer.attempt)
        if answer is not None and is_same and answer.length <= length:
            answer.output = request.output
            if answer.length < length:
                answer.await_mask(length)
                self._enqueue(answer)
            return request.request_id
        if answer is not None:
            self.forget([request.request_id])
        answer = self._begin(request, length)
        self._answers[request.request_id] = answer
        if not answer.is_ready:
            self._enqueue(answer)
        return request.request_id

    def _begin(self, request: MaskedRequest, length: int) -> _Answer:
        verdict = self._checks.known(request.asked)
        answer = _Answer(
            next(self._numbers),
            request.asked,
            Turn(tenant=request.tenant),
            request.attempt,
            request.output,
            length,
            0.0 if verdict is None else verdict.seconds,
            self._quick,
        )
        if verdict == TOO_COMPLEX:
            answer.end(None)
        is_slow = verdict is None or verdict.seconds > QUICK_COMPILE_SECONDS
        if is_slow or self._strikes_of(request.tenant) > MOST_STRIKES:
            answer.lane = self._least_busy()
        return answer

    def _enqueue(self, answer: _Answer) -> None:
        if not answer.lane.line.knows(answer):
            answer.lane.add(answer)
            answer.lane.thread.submit(self._serve, answer.lane)

    def _serve(self, lane: _Lane) -> None:
        """Compute the masks of the answers whose turn it is, on the lane's thread."""
        with self._changed:
            batch, gone = lane.take()
            jobs = [answer.begin() for answer in batch]
        answers = {answer.number: answer for answer in batch}
        for job, outcome in lane.worker.masks(jobs, gone):
            allowed = self._allowed(outcome, lane.worker.vocab_size)
            with self._changed:
                if not job.is_dropped:
                    self._end(answers[job.number], job, outcome, allowed)

    def _allowed(self, outcome: Found | Trouble, vocab_size: int) -> tuple[Allowed | None, ...]:
        """Return the allowed tokens of masks; None for any token, or for none."""
        if isinstance(outcome, str):
            return ()
        masks = (outcome,) if isinstance(outcome, Mask) else outcome.masks
        return tuple(self._read(mask, vocab_size) for mask in masks)

    def _end(
        self,
        answer: _Answer,
        job: MaskJob,
        outcome: Found | Trouble,
        allowed: tuple[Allowed | None, ...],
    ) -> None:
        lane = answer.lane
        answer.job = None
        seconds = 0.0
        if isinstance(outcome, Mask):
            answer.seconds += (seconds := outcome.seconds)
        elif isinstance(outcome, DraftMasks):
            answer.draft_seconds += (seconds := outcome.seconds)
        lane.line.charge(answer.request_id, int(seconds * 1e6))
        lane.drop(answer)
        if (answer.length, answer.drafts) != (job.length, job.drafts):
            if answer.drafts or not answer.is_ready:
                self._enqueue(answer)
            return
        if job.drafts:
            answer.drafted = allowed
            if outcome in ("slow", "hangs", "ends"):
                self._slow_down(answer)
            self._changed.notify_all()
            return
        self._take(answer, outcome, allowed)
        self._changed.notify_all()
        if answer.is_ready and self._ring is not None:
            ring, self._ring = self._ring, None
            ring()

    def _take(
        self, answer: _Answer, outcome: Found | Trouble, allowed: tuple[Allowed | None, ...]
    ) -> None:
        if isinstance(outcome, Mask):
            if answer.has_time(answer.seconds):
                answer.end(*allowed, binds=outcome.kind != "free")
            else:
                answer.end(None)
        elif outcome == "unavailable":
            answer.end(None)
        elif answer.lane is self._quick:
            self._slow_down(answer)
        else:
            if outcome != "hangs":
                self._checks.remember(answer.asked, TOO_COMPLEX)
            answer.end(None)

    def _slow_down(self, guilty: _Answer) -> None:
        """Continue all answers with a grammar that proved slow in slow lanes, and maybe all answers
        of its tenant."""
        self._checks.remember(guilty.asked, Verdict(seconds=SLOW.mask_seconds))
        tenant = guilty.turn.tenant
        strikes = self._strikes_of(tenant) + 1
        self._strikes[tenant] = strikes, monotonic()
        self._strikes.move_to_end(tenant)
        while len(self._strikes) > KNOWN_TENANTS:
            self._strikes.popitem(last=False)
        for answer in self._answers.values():
            is_tenant = strikes > MOST_STRIKES and answer.turn.tenant == tenant
            if answer.lane is self._quick and (is_tenant or answer.asked == guilty.asked):
                self._move(answer)

    def _move(self, answer: _Answer) -> None:
        answer.leave()
        answer.lane = self._least_busy()
        if not answer.is_ready:
            self._enqueue(answer)

    def _least_busy(self) -> _Lane:
        lanes = [answer.lane for answer in self._answers.values()]
        return min(self._slow, key=lanes.count)

    def _strikes_of(self, tenant: str) -> float:
        strikes, then = self._strikes.get(tenant, (0.0, 0.0))
        return max(0.0, strikes - (monotonic() - then) / STRIKE_SECONDS)
