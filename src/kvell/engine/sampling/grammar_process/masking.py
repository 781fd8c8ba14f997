"""Masks of a step's requests, from a worker that may be ended at any time.

A worker knows the place of each request in its grammar.  All of that follows from the request's
output, so a new worker goes on where one was ended; only the grammar that ended it does not.
"""

import signal
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputs
from kvell.engine.sampling.grammar_process.checking import TOO_COMPLEX, GrammarChecks
from kvell.engine.sampling.grammar_process.messages import AskMasks, LineEnded, LineLate, Mask, Need
from kvell.engine.sampling.grammar_process.processes import (
    GrammarProcesses,
    TokenizerError,
    Worker,
)
from kvell.engine.sampling.grammar_process.worker import allowed_seconds
from kvell.errors import ChangeSomething, TryLater
from kvell.vocabulary import MIB

MASK_ROOM_BYTES = 64 * MIB
"""Memory that all grammars of running requests may take together, with those just used."""
LATER_SECONDS = 2.0
"""Time beyond the processor time of a mask, on a busy machine, after which a worker hangs."""
MOST_ASKED_BYTES = 16 << 20
"""Of outputs and grammars in one message, before one more; a frame holds four times as much."""
GRAMMAR_BYTES = 4 * MAX_GRAMMAR_CHARS
TRIES = 2
"""A worker may end for other reasons than the request that it works on, but not twice."""


@dataclass(frozen=True)
class Wanted:
    """A request that draws a token under a grammar.

    :param output: its tokens so far, int32.
    """

    handle: int
    asked: StructuredOutputs
    output: npt.NDArray[np.int32]


@dataclass(frozen=True)
class FoundMask:
    """A mask, and the number of tokens that it knows."""

    mask: Mask
    known_tokens: int


class MaskWorker:
    """Asks for masks, on one thread.

    :param checks: know grammars that are too complex, and are told of those that end a worker.
    """

    def __init__(self, processes: GrammarProcesses, checks: GrammarChecks) -> None:
        self._processes, self._checks = processes, checks
        self._worker: Worker | None = None
        self._read: dict[int, int] = {}
        """Of each request that the worker knows, the tokens that it has read."""

    def masks(self, wanted: Sequence[Wanted], forget: Iterable[int]) -> dict[int, FoundMask | None]:
        """Masks by handle; None where the grammar is too complex, or no process can be had.

        :param forget: requests that have ended, some of whose handles may be wanted anew.
        """
        gone = tuple(handle for handle in forget if self._read.pop(handle, None) is not None)
        found: dict[int, FoundMask | None] = {
            one.handle: None
            for one in wanted
            if one.handle not in self._read and self._checks.known(one.asked) == TOO_COMPLEX
        }
        rest, tries = deque(one for one in wanted if one.handle not in found), 0
        while rest:
            before = len(rest)
            try:
                self._ask(rest, gone, found)
            except (TokenizerError, ChangeSomething, TryLater):
                return found | {one.handle: None for one in rest}
            except LineEnded as error:
                tries = 1 if len(rest) < before else tries + 1
                took_too_long = self._took_too_long(rest[0], str(error))
                if took_too_long or tries == TRIES:
                    guilty, tries = rest.popleft(), 0
                    if not isinstance(error, LineLate):
                        self._checks.remember(guilty.asked, TOO_COMPLEX)
                    found[guilty.handle] = None
            gone = ()
        return found

    def _ask(
        self, rest: deque[Wanted], gone: tuple[int, ...], found: dict[int, FoundMask | None]
    ) -> None:
        """Move requests from the rest to those found, one by one."""
        if self._worker is None:
            self._worker = self._processes.fork(MASK_ROOM_BYTES)
        line, known = self._worker.line, self._worker.vocab_size
        needs = self._needs(rest)
        line.send(AskMasks(gone, needs), allowed_seconds(0) + LATER_SECONDS)
        for need in needs:
            told = line.receive(allowed_seconds(len(need.fresh) // 4) + LATER_SECONDS)
            assert isinstance(told, Mask)
            one = rest.popleft()
            self._read[one.handle] = len(one.output)
            found[one.handle] = FoundMask(told, known)

    def _needs(self, rest: Iterable[Wanted]) -> tuple[Need, ...]:
        """What to ask at once: all of the rest, but for long outputs that are read anew."""
        needs, size_bytes = list[Need](), 0
        for one in rest:
            needs.append(self._need(one))
            size_bytes += len(needs[-1].fresh) + (0 if needs[-1].asked is None else GRAMMAR_BYTES)
            if size_bytes > MOST_ASKED_BYTES:
                break
        return tuple(needs)

    def _need(self, one: Wanted) -> Need:
        read = self._read.get(one.handle)
        fresh = one.output[read or 0 :].astype("<i4").tobytes()
        return Need(one.handle, fresh, one.asked if read is None else None)

    def _took_too_long(self, suspect: Wanted, error: str) -> bool:
        """End the worker; return whether it ended because a mask took too long to compute."""
        assert self._worker is not None
        worker, self._worker = self._worker, None
        self._read.clear()
        code = self._processes.end(worker, f"{error}, at a mask of {suspect.asked.kind}")
        return code == -signal.SIGPROF
