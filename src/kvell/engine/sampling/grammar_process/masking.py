"""Masks of a step's requests, from a worker that may end at any time.

A worker stores each request's position in its grammar.  The position follows from the request's
output, so a new worker can continue; only the grammar that ended the old worker is given up.
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
"""Memory that the grammars of running and recent requests may take together."""
LATER_SECONDS = 2.0
"""A worker that exceeds a mask's processor time by this hangs, even on a busy machine."""
MOST_ASKED_BYTES = 16 << 20
"""The size of a message at which no further request is added; a frame holds four times it."""
GRAMMAR_BYTES = 4 * MAX_GRAMMAR_CHARS
TRIES = 2
"""A worker may end for a reason other than its current request, but not twice."""


@dataclass(frozen=True)
class MaskedRequest:
    """A request that draws a token under a grammar.

    :param output: output tokens so far, int32.
    """

    handle: int
    asked: StructuredOutputs
    output: npt.NDArray[np.int32]


@dataclass(frozen=True)
class FoundMask:
    """A mask, and the vocabulary size of its tokenizer."""

    mask: Mask
    known_tokens: int


class MaskWorker:
    """The client of a mask worker, on one thread.

    :param checks: verdicts on grammars; a grammar that ends a worker is added as too complex.
    """

    def __init__(self, processes: GrammarProcesses, checks: GrammarChecks) -> None:
        self._processes, self._checks = processes, checks
        self._worker: Worker | None = None
        self._read: dict[int, int] = {}
        """The number of output tokens that the worker has read, by request."""

    def masks(
        self, wanted: Sequence[MaskedRequest], forget: Iterable[int]
    ) -> dict[int, FoundMask | None]:
        """Return masks by handle; None if the grammar is too complex, or no process can start.

        :param forget: handles of requests that have ended; new requests may reuse them.
        """
        gone = tuple(handle for handle in forget if self._read.pop(handle, None) is not None)
        masks: dict[int, FoundMask | None] = {
            request.handle: None
            for request in wanted
            if request.handle not in self._read and self._checks.known(request.asked) == TOO_COMPLEX
        }
        rest = deque(request for request in wanted if request.handle not in masks)
        tries = 0
        while rest:
            before = len(rest)
            try:
                self._ask(rest, gone, masks)
            except (TokenizerError, ChangeSomething, TryLater):
                return masks | {request.handle: None for request in rest}
            except LineEnded as error:
                tries = 1 if len(rest) < before else tries + 1
                took_too_long = self._took_too_long(rest[0], str(error))
                if took_too_long or tries == TRIES:
                    guilty = rest.popleft()
                    tries = 0
                    if not isinstance(error, LineLate):
                        self._checks.remember(guilty.asked, TOO_COMPLEX)
                    masks[guilty.handle] = None
            gone = ()
        return masks

    def _ask(
        self, rest: deque[MaskedRequest], gone: tuple[int, ...], masks: dict[int, FoundMask | None]
    ) -> None:
        """Compute the masks of the rest, and remove each request when it has its mask."""
        if self._worker is None:
            self._worker = self._processes.fork(MASK_ROOM_BYTES)
        line, vocab_size = self._worker.line, self._worker.vocab_size
        needs = self._needs(rest)
        line.send(AskMasks(gone, needs), allowed_seconds(0) + LATER_SECONDS)
        for need in needs:
            mask = line.receive(allowed_seconds(len(need.fresh) // 4) + LATER_SECONDS)
            assert isinstance(mask, Mask)
            request = rest.popleft()
            self._read[request.handle] = len(request.output)
            masks[request.handle] = FoundMask(mask, vocab_size)

    def _needs(self, rest: Iterable[MaskedRequest]) -> tuple[Need, ...]:
        """Return the needs of the rest for one message, up to its size limit."""
        needs, size_bytes = list[Need](), 0
        for request in rest:
            needs.append(self._need(request))
            size_bytes += len(needs[-1].fresh) + (0 if needs[-1].asked is None else GRAMMAR_BYTES)
            if size_bytes > MOST_ASKED_BYTES:
                break
        return tuple(needs)

    def _need(self, request: MaskedRequest) -> Need:
        read = self._read.get(request.handle)
        fresh = request.output[read or 0 :].astype("<i4").tobytes()
        return Need(request.handle, fresh, request.asked if read is None else None)

    def _took_too_long(self, suspect: MaskedRequest, error: str) -> bool:
        """End the worker; return whether a mask took too much processor time."""
        assert self._worker is not None
        worker, self._worker = self._worker, None
        self._read.clear()
        code = self._processes.end(worker, f"{error}, at a mask of {suspect.asked.kind}")
        return code == -signal.SIGPROF
