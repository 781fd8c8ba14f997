"""Whether grammars can be followed: each is tried in a worker once, and what came is remembered.

Tenants take turns, and are charged for the time that their grammars take.
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

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.equal_parts import EqualParts
from kvell.engine.requests.turns import Turn, TurnQueue
from kvell.engine.sampling.grammar_process.messages import Check, Checked, LineEnded, LineLate
from kvell.engine.sampling.grammar_process.processes import (
    GrammarProcesses,
    TokenizerError,
    Worker,
)
from kvell.errors import ChangeSomething, TryLater
from kvell.vocabulary import MIB, RequestId

CHECK_ROOM_BYTES = 32 * MIB
"""Memory that a grammar may take while it is tried; JSON schemas of 100 KB take one MiB."""
ANSWER_SECONDS = 10.0
"""A worker that says nothing for so long is stopped, or the machine swaps."""
NICENESS = 5
"""Steps go first: nobody reads the answer yet whose grammar is being tried."""
KNOWN_VERDICTS = 4096
MOST_WAITING = 64
"""Grammars that wait to be tried, each of at most ``MAX_GRAMMAR_CHARS``."""
TRIES = 2
"""A worker may end for other reasons than the grammar that it works on, but not twice."""
COMPLAINTS = ("too many", "too complex", "too large", "too big", "limits.", "fuel")
"""Words of llguidance's about bounds of its own."""

STOPPED_BY_OTHERS = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Exit codes of a worker that no grammar causes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What is known of a grammar.

    :param problem: why it cannot be followed; "" if it can.
    :param is_too_complex: whether it exceeds a bound.
    """

    problem: str = ""
    is_too_complex: bool = False


TOO_COMPLEX = Verdict("is too complex to follow", is_too_complex=True)
GOOD = Verdict()


@dataclass(eq=False)
class _Try:
    """A grammar that waits for its turn, or is tried.

    :param request_id: stands for its key.
    """

    request_id: RequestId
    turn: Turn
    asked: StructuredOutputs
    key: bytes
    verdict: "Future[Verdict]" = field(default_factory=Future)


class GrammarChecks:
    """Tries grammars one after the other on a thread of its own, in turn by tenant."""

    def __init__(self, processes: GrammarProcesses) -> None:
        self._processes = processes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-grammar-checks")
        self._lock = Lock()
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._tries: dict[bytes, _Try] = {}
        self._line: TurnQueue[_Try] = TurnQueue()
        self._parts = EqualParts(MOST_WAITING, "grammar", "grammars wait to be compiled")
        self._worker: Worker | None = None
        self._told: set[str] = set()

    def known(self, asked: StructuredOutputs) -> Verdict | None:
        """What is known of a grammar; None before it was tried."""
        key = _key(asked)
        with self._lock:
            verdict = self._known.get(key)
            if verdict is not None:
                self._known.move_to_end(key)
            return verdict

    def tried(self, asked: StructuredOutputs, tenant: str = "") -> Future[Verdict]:
        """Try a grammar; callers that ask for the same meanwhile get the same future.

        The future raises :class:`.TryLater` if no process could be started, or none got on.

        :param tenant: whose turn it takes.
        :raises TryLater: if too many wait to be tried.
        """
        key = _key(asked)
        with self._lock:
            if key in self._tries:
                return self._tries[key].verdict
            self._parts.take(tenant, 1)
            one = _Try(RequestId(key.hex()), Turn(tenant=tenant), asked, key)
            self._tries[key] = one
            self._line.add(one)
            self._thread.submit(self._try_next)
            return one.verdict

    def remember(self, asked: StructuredOutputs, verdict: Verdict) -> None:
        """Note what was found out otherwise."""
        with self._lock:
            self._remember(_key(asked), verdict)

    def close(self) -> None:
        """Try no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = self._line.clear()
        for one in waiting:
            one.verdict.cancel()

    def _try_next(self) -> None:
        with self._lock:
            one = self._line.first()
            if one is None:
                return  # it was closed
            self._line.take(one)
        one.verdict.set_running_or_notify_cancel()
        began, verdict, failure = perf_counter_ns(), None, None
        try:
            verdict = self._verdict(one.asked)
        except BaseException as error:
            failure = error
        with self._lock:
            del self._tries[one.key]
            self._line.charge(one.request_id, (perf_counter_ns() - began) // 1000)
            self._line.discard(one)
            self._parts.give_back(one.turn.tenant, 1)
            if verdict is not None:
                self._remember(one.key, verdict)
        if verdict is not None:
            one.verdict.set_result(verdict)
        else:
            one.verdict.set_exception(failure)

    def _verdict(self, asked: StructuredOutputs) -> Verdict:
        ended: LineEnded | None = None
        code: int | None = None
        for _ in range(TRIES):
            try:
                if self._worker is None:
                    self._worker = self._processes.fork(CHECK_ROOM_BYTES, NICENESS)
                return self._asked(self._worker, asked)
            except (TokenizerError, ChangeSomething) as error:
                return Verdict(str(error))
            except LineEnded as error:
                assert self._worker is not None
                worker, self._worker, ended = self._worker, None, error
                code = self._processes.end(worker, f"{error}, in a check of {asked.kind}")
                if code == -signal.SIGPROF:
                    return TOO_COMPLEX
        if isinstance(ended, LineLate):
            raise TryLater("the machine is too busy to compile a grammar")
        if code in STOPPED_BY_OTHERS:
            raise TryLater("something else ended the process that compiles grammars")
        return TOO_COMPLEX

    def _asked(self, worker: Worker, asked: StructuredOutputs) -> Verdict:
        worker.line.send(Check(asked.bare()), ANSWER_SECONDS)
        told = worker.line.receive(ANSWER_SECONDS)
        assert isinstance(told, Checked)
        self._tell(told.unfollowed)
        said, _, _ = told.problem.partition("<state>")  # of llguidance's parser follows
        text = " ".join(said.split())[:300]
        return Verdict(text, any(words in told.problem.lower() for words in COMPLAINTS))

    def _tell(self, keywords: Iterable[str]) -> None:
        """Say once of each keyword that answers are not held to it."""
        for keyword in keywords:
            if keyword not in self._told:
                self._told.add(keyword)
                logger.warning("schemas say more than grammars follow: %s is left out", keyword)

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        self._known[key] = verdict
        self._known.move_to_end(key)
        if len(self._known) > KNOWN_VERDICTS:
            self._known.popitem(last=False)


def _key(asked: StructuredOutputs) -> bytes:
    """Stands for a constraint, wherever in an answer it begins; texts may be long."""
    return sha256(msgspec.msgpack.encode(asked.bare())).digest()
