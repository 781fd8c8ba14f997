"""The client of a worker that computes masks; the worker may end at any time.

A worker stores each answer's position in its grammar.  The position follows from the answer's
output, so a new worker can continue; only the grammar that ended the old worker is given up.
"""

import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputs
from kvell.engine.sampling.grammar_process.messages import (
    DRAFTS_SECONDS,
    LOWEST,
    AskMasks,
    DraftMasks,
    LineEnded,
    LineLate,
    Mask,
    Need,
)
from kvell.engine.sampling.grammar_process.processes import (
    GrammarProcesses,
    TokenizerError,
    Worker,
)
from kvell.errors import ChangeSomething, TryLater
from kvell.vocabulary import MIB

LATER_SECONDS = 2.0
"""A quick worker that exceeds a mask's processor time by this hangs, even on a busy machine."""
MOST_ASKED_BYTES = 16 << 20
"""The size of a message at which no further answer is added; a frame holds four times it."""
GRAMMAR_BYTES = 4 * MAX_GRAMMAR_CHARS
TRIES = 2
"""A worker may end for a reason other than its current answer, but not twice."""

OutputTokens: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
Trouble: TypeAlias = Literal["slow", "hangs", "ends", "unavailable"]
"""Why there is no mask: it takes more processor time than it may, the worker hangs or ends at it,
or no worker can be started."""


@dataclass(frozen=True)
class WorkerLimits:
    """The limits of a worker.

    :param room_bytes: memory that the grammars of its answers may take together.
    :param tokens_per_second: the speed of reading unread output, which extends that time.
    :param lateness: factor of the time after which it hangs; higher for a worker of low priority.
    """

    room_bytes: int
    niceness: int
    mask_seconds: float
    tokens_per_second: int
    lateness: int = 1


QUICK = WorkerLimits(64 * MIB, 0, 0.02, 50_000)
SLOW = WorkerLimits(32 * MIB, LOWEST, 1.0, 10_000, 150)


@dataclass(eq=False)
class MaskJob:
    """An answer that needs the mask of the token after its first ``length`` tokens.

    :param number: the answer's, unique among all answers of a worker.
    :param compile_seconds: the processor time of compiling its grammar.
    :param drafts: draft tokens after those; then it needs the masks after each of them instead.
    :ivar is_dropped: whether the mask is no longer wanted from this worker.
    """

    number: int
    asked: StructuredOutputs
    output: OutputTokens
    length: int
    compile_seconds: float
    drafts: tuple[int, ...] = ()
    is_dropped: bool = False


Found: TypeAlias = Mask | DraftMasks


class MaskWorker:
    """The client of a mask worker, on one thread.

    :ivar vocab_size: the size of its tokenizer; many models have logits for more tokens.
    """

    def __init__(self, processes: GrammarProcesses, limits: WorkerLimits) -> None:
        self._processes, self._limits = processes, limits
        self.worker: Worker | None = None
        self.vocab_size = 0
        self._read: dict[int, int] = {}
        """The number of output tokens that the worker has read, by answer."""

    def masks(
        self, jobs: Sequence[MaskJob], forget: Iterable[int]
    ) -> Iterator[tuple[MaskJob, Found | Trouble]]:
        """Yield each job with its mask or masks, or with the reason why it has none."""
        gone = tuple(number for number in forget if self._read.pop(number, None) is not None)
        rest = deque(jobs)
        tries = 0
        while rest:
            before = len(rest)
            try:
                yield from self._ask(rest, gone)
            except (TokenizerError, ChangeSomething, TryLater):
                yield from ((job, "unavailable") for job in rest)
                return
            except LineEnded as error:
                tries = 1 if len(rest) < before else tries + 1
                took_too_long = self._took_too_long(rest[0], str(error))
                if took_too_long or tries == TRIES:
                    tries = 0
                    hangs = isinstance(error, LineLate)
                    yield rest.popleft(), "hangs" if hangs else "slow" if took_too_long else "ends"
                rest = deque(job for job in rest if not job.is_dropped)
            gone = ()

    def _ask(self, rest: deque[MaskJob], gone: tuple[int, ...]) -> Iterator[tuple[MaskJob, Found]]:
        if self.worker is None:
            limits = self._limits
            self.worker = self._processes.fork(limits.room_bytes, limits.niceness)
        line, self.vocab_size = self.worker.line, self.worker.template.vocab_size
        needs = self._needs(rest)
        later_seconds = LATER_SECONDS * self._limits.lateness
        line.send(AskMasks(gone, needs), later_seconds)
        for need in needs:
            reply = line.receive(need.seconds * self._limits.lateness + later_seconds)
            assert isinstance(reply, Mask | DraftMasks)
            job = rest.popleft()
            self._read[job.number] = job.length
            if isinstance(reply, DraftMasks) and reply.is_lost:
                del self._read[job.number]
            yield job, reply

    def _needs(self, jobs: Iterable[MaskJob]) -> tuple[Need, ...]:
        """Return the needs of jobs for one message, up to its size limit."""
        needs, size_bytes = list[Need](), 0
        for job in jobs:
            needs.append(self._need(job))
            size_bytes += (
                len(needs[-1].fresh)
                + len(needs[-1].drafts)
                + (0 if needs[-1].asked is None else GRAMMAR_BYTES)
            )
            if size_bytes > MOST_ASKED_BYTES:
                break
        return tuple(needs)

    def _need(self, job: MaskJob) -> Need:
        read = self._read.get(job.number)
        fresh = np.asarray(job.output[read or 0 : job.length], "<i4").tobytes()
        seconds = self._limits.mask_seconds
        seconds += len(fresh) // 4 / self._limits.tokens_per_second
        drafts = np.asarray(job.drafts, "<i4").tobytes()
        seconds += DRAFTS_SECONDS * bool(drafts)
        if read is None:  # the worker may have to compile the grammar
            compile_seconds = 2 * job.compile_seconds
            return Need(job.number, seconds + compile_seconds, fresh, job.asked, drafts)
        return Need(job.number, seconds, fresh, drafts=drafts)

    def _took_too_long(self, suspect: MaskJob, error: str) -> bool:
        """End the worker; return whether a mask took too much processor time."""
        assert self.worker is not None
        worker, self.worker = self.worker, None
        self._read.clear()
        code = self._processes.end(worker, f"{error}, at a mask of {suspect.asked.kind}")
        return code == -signal.SIGPROF
