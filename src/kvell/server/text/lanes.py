"""Threads that texts and pictures wait for, so that long ones hold nobody up but each other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from kvell.device.process_size import give_back_freed
from kvell.engine.requests.equal_parts import EqualParts
from kvell.engine.requests.turns import Turn, TurnQueue
from kvell.errors import Bound
from kvell.server.text.held_tensors import HeldTensors
from kvell.server.text.text_bounds import SHORT_BYTES
from kvell.vocabulary import MIB, RequestId

Made = TypeVar("Made")
MOST_TOLD_BYTES = 128 * MIB
"""Of log probabilities that answers in the making may have, all together."""
WAITING_BYTES = 32 * MIB
"""Of texts, and apart from that of pictures, that may wait for a thread."""


@dataclass(eq=False)
class _Piece(Generic[Made]):
    """A piece of work that waits for the thread.

    :param made: what it makes, for whoever waits.
    """

    request_id: RequestId
    turn: Turn
    size_bytes: int
    work: Callable[[], Made]
    made: "asyncio.Future[Made]"


class Lane:
    """One thread; those who wait for it take turns by tenant, and each tenant's work is in order.

    A cancelled caller leaves the line.

    :param bound: that is exceeded when too much waits.
    :param most_bytes: that may wait and be worked on (:class:`.EqualParts`).
    :param trims: whether freed memory goes back to the system after each piece of work.
    """

    def __init__(self, name: str, bound: Bound, most_bytes: int, *, trims: bool) -> None:
        self._bytes, self._trims = EqualParts(most_bytes, bound, "bytes wait to be read"), trims
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._line: TurnQueue[_Piece[Any]] = TurnQueue()
        self._numbers = count()
        self._is_busy = False

    @property
    def bytes_here(self) -> int:
        """Bytes that wait or are worked on."""
        return self._bytes.total

    async def run(self, size_bytes: int, work: Callable[[], Made], tenant: str = "") -> Made:
        """Do a piece of work in the thread, and return what it makes.

        Being cancelled while it runs does not stop it, and the next piece waits for its end.

        :param tenant: whose turn it takes, and who is charged.
        :raises TryLater: if too much waits already.
        """
        self._bytes.take(tenant, size_bytes)
        turn = Turn(tenant=tenant)
        made: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
        piece = _Piece(RequestId(str(next(self._numbers))), turn, size_bytes, work, made)
        self._line.add(piece)
        if not self._is_busy:
            self._begin_next()
        try:
            return await made
        finally:
            if self._line.discard(piece):  # cancelled before its turn
                self._forget(piece)

    def _begin_next(self) -> None:
        """Let the thread do whoever's turn it is."""
        self._is_busy = False
        while not self._is_busy and (piece := self._line.first()) is not None:
            self._line.take(piece)
            self._line.charge(piece.request_id, piece.size_bytes)
            try:
                submitted = self._thread.submit(self._done, piece.work)
            except RuntimeError as error:  # the lane is closed
                self._tell(piece, error)
                continue
            self._is_busy = True
            running = asyncio.wrap_future(submitted, loop=piece.made.get_loop())
            running.add_done_callback(partial(self._heard, piece))

    def _heard(self, piece: "_Piece[Made]", running: "asyncio.Future[Made]") -> None:
        """A piece of work is done."""
        if running.cancelled():
            piece.made.cancel()
            self._forget(piece)
        elif (error := running.exception()) is not None:
            self._tell(piece, error)
        else:
            if not piece.made.done():
                piece.made.set_result(running.result())
            self._forget(piece)
        self._begin_next()

    def _tell(self, piece: "_Piece[Made]", error: BaseException) -> None:
        """A piece of work has failed; nobody may be left to hear of it."""
        if not piece.made.done():
            piece.made.set_exception(error)
        self._forget(piece)

    def _forget(self, piece: "_Piece[Made]") -> None:
        self._line.discard(piece)
        self._bytes.give_back(piece.turn.tenant, piece.size_bytes)

    def close(self) -> None:
        """End the thread, after the work that it has begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: Callable[[], Made]) -> Made:
        try:
            return work()
        finally:
            if self._trims:
                give_back_freed()


class _Lanes:
    def __init__(self) -> None:
        self.short = Lane("kvell-short-texts", "text_bytes", WAITING_BYTES, trims=False)
        self.long = Lane("kvell-long-texts", "text_bytes", WAITING_BYTES, trims=True)
        self.pictures = Lane("kvell-pictures", "image_pixels", 2 * WAITING_BYTES, trims=True)


def _told_bytes() -> EqualParts:
    return EqualParts(MOST_TOLD_BYTES // 2, "logprob_bytes", "bytes of log probabilities are kept")


class TextWork:
    """The lanes of one process, which all its models share.

    :param tenant: whose work this is.
    :ivar held: tensors of pictures in requests that have not ended.
    :ivar told: how likely tokens are, in answers that are not sent yet.
    """

    def __init__(self, tenant: str = "", shared: "TextWork | None" = None) -> None:
        self._tenant = tenant
        self._lanes: _Lanes = _Lanes() if shared is None else shared._lanes
        self.held: HeldTensors = HeldTensors() if shared is None else shared.held
        self.told: EqualParts = _told_bytes() if shared is None else shared.told

    def of(self, tenant: str) -> "TextWork":
        """The same lanes, where this tenant waits in its own turn."""
        return TextWork(tenant, self)

    async def run(self, size_bytes: int, work: Callable[[], Made]) -> Made:
        """Work on a text among those of its kind, short or long.

        :raises TryLater: if too many of them wait.
        """
        lane = self._lanes.short if size_bytes <= SHORT_BYTES else self._lanes.long
        return await lane.run(size_bytes, work, self._tenant)

    async def run_pictured(self, size_bytes: int, work: Callable[[], Made]) -> Made:
        """Decode the pictures of one request.

        :raises TryLater: if too many of them wait.
        """
        return await self._lanes.pictures.run(size_bytes, work, self._tenant)

    def close(self) -> None:
        """End the threads."""
        for lane in (self._lanes.short, self._lanes.long, self._lanes.pictures):
            lane.close()
