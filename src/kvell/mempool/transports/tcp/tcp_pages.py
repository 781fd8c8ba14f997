"""The pages of a peer, received over a separate TCP connection."""

import threading
from collections.abc import Callable, Hashable, Sequence

import msgspec

from kvell.errors import KvellError
from kvell.mempool.transports.page_copies import Bytes, Piece
from kvell.mempool.transports.source import STOPPED
from kvell.mempool.transports.tcp.reading import (
    MOST_EXTENTS,
    REPLY_BYTES,
    PieceHead,
    ReadEnded,
    ReadPages,
    Reply,
    checksum,
    in_pieces,
    pack,
)
from kvell.wire.blocking import BlockingSocket, Look, WaitStopped, unless, within
from kvell.wire.frames import ProtocolError

REQUEST_SECONDS = 10.0
"""The time in which the owner must receive a request."""

_REPLIES: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)


class TcpPages:
    """A :class:`.PageSource` that connects at its first pull, and again after a failed one.

    :param opens: opens an authenticated connection to the peer, for pages.
    """

    def __init__(self, opens: Callable[[], BlockingSocket]) -> None:
        self.lane: Hashable = object()
        self._opens = opens
        self._channel: BlockingSocket | None = None
        self._reading = threading.Lock()
        self._is_closed = False

    def bring(
        self, number: int, pieces: Sequence[Piece], target: Bytes, stop: threading.Event
    ) -> str:
        """Implement :meth:`.PageSource.bring`."""
        with self._reading:
            try:
                return self._brought(number, pieces, target, unless(stop))
            except WaitStopped:
                self._let_go()
                return STOPPED
            except (OSError, KvellError) as error:
                self._let_go()
                return f"its pages did not arrive: {error}"
            finally:
                if self._is_closed:
                    self._let_go()

    def close(self) -> None:
        """Implement :meth:`.PageSource.close`."""
        self._is_closed = True
        channel = self._channel
        if channel is not None:
            channel.hang_up()
        if self._reading.acquire(blocking=False):  # otherwise the reader closes it
            self._let_go()
            self._reading.release()

    def _let_go(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _brought(self, number: int, pieces: Sequence[Piece], target: Bytes, look: Look) -> str:
        if self._channel is None and not self._is_closed:
            self._channel = self._opens()
        if self._channel is None or self._is_closed:
            raise ProtocolError("it is no longer connected")
        memory = target.data
        for start in range(0, len(pieces), MOST_EXTENTS):
            some = pieces[start : start + MOST_EXTENTS]
            problem = self._read(self._channel, number, some, memory, look)
            if problem:
                return problem
        return ""

    def _read(
        self,
        channel: BlockingSocket,
        number: int,
        pieces: Sequence[Piece],
        memory: memoryview,
        look: Look,
    ) -> str:
        """Send one request and return the owner's reason why its pages are invalid, or ""."""
        extents = pack((piece.source, piece.size_bytes) for piece in pieces)
        channel.say(ReadPages(number, extents), within(REQUEST_SECONDS))
        for parts in in_pieces((piece.target, piece.size_bytes) for piece in pieces):
            head = channel.hear(_REPLIES, REPLY_BYTES, look)
            if isinstance(head, ReadEnded):
                return head.problem or "it ended before all pages arrived"
            views = [memory[offset : offset + size_bytes] for offset, size_bytes in parts]
            if head.size_bytes != sum(view.nbytes for view in views):
                raise ProtocolError("received a piece of another size")
            channel.receive(views, look)
            if checksum(views) != head.checksum:
                return _why_damaged(channel.hear(_REPLIES, REPLY_BYTES, look))
        end = channel.hear(_REPLIES, REPLY_BYTES, look)
        if isinstance(end, PieceHead):
            raise ProtocolError("received more than was requested")
        return end.problem


def _why_damaged(following: Reply) -> str:
    """Return the reason for a bad checksum, a right that was revoked during the read.

    :raises ProtocolError: when the right was valid, so that the network corrupted the bytes.
    """
    if isinstance(following, ReadEnded) and following.problem:
        return following.problem
    raise ProtocolError("a piece was damaged in transit: its checksum differs")
