"""Checks of grammars: a worker compiles each grammar once, and the verdict is cached.

Tenants take turns, and are charged for the time of their grammars.
"""

import logging
import signal
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Lock
from time import perf_counter_ns

import msgspec

from kvell.engine.protocol.schemas.strict import StrictViolation
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.turns import EqualParts, Turn, TurnQueue
from kvell.engine.sampling.grammar_process.messages import Check, Checked, LineEnded, LineLate
from kvell.engine.sampling.grammar_process.processes import (
    GrammarProcesses,
    TokenizerError,
    Worker,
)
from kvell.errors import ChangeSomething, TryLater
from kvell.vocabulary import MIB, RequestId

CHECK_ROOM_BYTES = 32 * MIB
"""Memory that the check of a grammar may take; a JSON schema of 100 KB takes one MiB."""
ANSWER_SECONDS = 10.0
"""A worker that does not answer within this time hangs, or the machine swaps."""
NICENESS = 5
"""A lower priority than steps: a request whose grammar is being checked has no output yet."""
KNOWN_VERDICTS = 4096
MOST_WAITING = 64
"""The most grammars that wait for a check, each of at most ``MAX_GRAMMAR_CHARS``."""
TRIES = 2
"""A worker may end for a reason other than its grammar, but not twice."""
COMPLAINTS = ("too many", "too complex", "too large", "too big", "limits.", "fuel")
"""Words in llguidance's errors about its limits."""

STOPPED_BY_OTHERS = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Exit codes that a grammar does not cause."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """The result of a grammar's check.

    :param problem: the reason why it is not supported; "" if it is.
    :param violation: a keyword of a strict part that it does not enforce.
    :param seconds: the processor time of compiling it, or of a slow mask of it.
    """

    problem: str = ""
    is_too_complex: bool = False
    violation: StrictViolation | None = None
    seconds: float = field(default=0.0, compare=False)


TOO_COMPLEX = Verdict("is too complex to follow", is_too_complex=True)
GOOD = Verdict()


@dataclass(eq=False)
class _Try:
    """A grammar that waits for its check, or is being checked."""

    request_id: RequestId
    turn: Turn
    asked: StructuredOutputs
    key: bytes
    verdict: "Future[Verdict]" = field(default_factory=Future)


class GrammarChecks:
    """A thread that checks grammars one by one, in turn by tenant."""

    def __init__(self, processes: GrammarProcesses) -> None:
        self._processes = processes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-grammar-checks")
        self._lock = Lock()
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._tries: dict[bytes, _Try] = {}
        self._line: TurnQueue[_Try] = TurnQueue()
        self.parts = EqualParts(MOST_WAITING, "grammar", "grammars are waiting to be compiled")
        self.worker: Worker | None = None
        self._told: set[str] = set()

    def known(self, constraint: StructuredOutputs) -> Verdict | None:
        """Return the verdict on a grammar, or None before its check."""
        key = _key(constraint)
        with self._lock:
            verdict = self._known.get(key)
            if verdict is not None:
                self._known.move_to_end(key)
            return verdict

    def check(self, constraint: StructuredOutputs, tenant: str = "") -> Future[Verdict]:
        """Queue a check; callers with the same grammar get the same future until its verdict.

        The future raises :class:`.TryLater` if no process could be started or finish the check.

        :param tenant: the tenant whose turn the check takes.
        :raises TryLater: if too many grammars wait.
        """
        key = _key(constraint)
        with self._lock:
            if key in self._tries:
                return self._tries[key].verdict
            self.parts.take(tenant, 1)
            attempt = _Try(RequestId(key.hex()), Turn(tenant=tenant), constraint, key)
            self._tries[key] = attempt
            self._line.add(attempt)
            self._thread.submit(self._try_next)
            return attempt.verdict

    def remember(self, constraint: StructuredOutputs, verdict: Verdict) -> None:
        with self._lock:
            self._remember(_key(constraint), verdict)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = self._line.clear()
        for attempt in waiting:
            attempt.verdict.cancel()

    def _try_next(self) -> None:
        with self._lock:
            attempt = self._line.first()
            if attempt is None:
                return  # closed
            self._line.take(attempt)
        attempt.verdict.set_running_or_notify_cancel()
        began = perf_counter_ns()
        verdict = None
        failure = None
        try:
            verdict = self._verdict(attempt.asked)
        except BaseException as error:
            failure = error
        with self._lock:
            del self._tries[attempt.key]
            self._line.charge(attempt.request_id, (perf_counter_ns() - began) // 1000)
            self._line.discard(attempt)
            self.parts.give_back(attempt.turn.tenant, 1)
            if verdict is not None:
                self._remember(attempt.key, verdict)
        if verdict is not None:
            attempt.verdict.set_result(verdict)
        else:
            attempt.verdict.set_exception(failure)

    def _verdict(self, constraint: StructuredOutputs) -> Verdict:
        ended: LineEnded | None = None
        code: int | None = None
        for _ in range(TRIES):
            try:
                if self.worker is None:
                    self.worker = self._processes.fork(CHECK_ROOM_BYTES, NICENESS)
                return self.ask_worker(self.worker, constraint)
            except (TokenizerError, ChangeSomething) as error:
                return Verdict(str(error))
            except LineEnded as error:
                assert self.worker is not None
                worker, self.worker, ended = self.worker, None, error
                code = self._processes.end(worker, f"{error}, in a check of {constraint.kind}")
                if code == -signal.SIGPROF:
                    return TOO_COMPLEX
        if isinstance(ended, LineLate):
            raise TryLater("the machine is too busy to compile a grammar")
        if code in STOPPED_BY_OTHERS:
            raise TryLater("something else ended the process that compiles grammars")
        return TOO_COMPLEX

    def ask_worker(self, worker: Worker, constraint: StructuredOutputs) -> Verdict:
        worker.line.send(Check(constraint.bare()), ANSWER_SECONDS)
        reply = worker.line.receive(ANSWER_SECONDS)
        assert isinstance(reply, Checked)
        if reply.violation is not None:
            return Verdict(violation=reply.violation)
        self._tell(reply.unfollowed)
        problem, _, _ = reply.problem.partition("<state>")  # without the parser's state
        text = " ".join(problem.split())[:300]
        is_too_complex = any(words in reply.problem.lower() for words in COMPLAINTS)
        return Verdict(text, is_too_complex, seconds=reply.seconds)

    def _tell(self, keywords: Iterable[str]) -> None:
        for keyword in keywords:
            if keyword not in self._told:
                self._told.add(keyword)
                logger.warning(
                    "grammars do not enforce a schema keyword: %s; answers may violate it", keyword
                )

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        self._known[key] = verdict
        self._known.move_to_end(key)
        if len(self._known) > KNOWN_VERDICTS:
            self._known.popitem(last=False)


def _key(constraint: StructuredOutputs) -> bytes:
    """Return a digest of a constraint without its reasoning; the constraint may be long."""
    return sha256(msgspec.msgpack.encode(constraint.bare())).digest()
