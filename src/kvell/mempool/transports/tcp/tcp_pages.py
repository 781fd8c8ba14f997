"""The pages of a peer, received over a separate TCP connection."""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvell.errors import KvellError
from kvell.mempool.transports.page_copies import Bytes, Piece
from kvell.mempool.transports.rights import Extent, Rights
from kvell.mempool.transports.source import RIGHT_GONE, STOPPED
from kvell.mempool.transports.tcp.served_peers import ServedPeers
from kvell.wire.blocking import BlockingSocket, Look, WaitStopped, unless, within
from kvell.wire.frames import ProtocolError, frame

PIECE_BYTES = 1 << 20
"""The largest size of a piece, the unit of sending and checking."""
PIECE_PARTS = 256
"""The most disjoint parts of a piece."""
MOST_EXTENTS = 8192
"""The most extents of one request; a longer pull makes several."""
REQUEST_BYTES = 16 * MOST_EXTENTS + 256
REPLY_BYTES = 4096
"""The largest size of a message between pieces."""


class ReadPages(Struct, frozen=True, tag=True):
    """A request for bytes of the owner's pool.

    :param number: the number of the owner's transfer that offered them.
    :param extents: offset and size in bytes of each, little-endian int64 pairs.
    """

    number: int
    extents: bytes


class PieceHead(Struct, frozen=True, tag=True):
    """The head of a piece: the number of bytes that follow, and their crc32."""

    size_bytes: int
    checksum: int


class ReadEnded(Struct, frozen=True, tag=True):
    """The end of an answer; ``problem`` is "" if all bytes were sent and are valid."""

    problem: str


Reply = PieceHead | ReadEnded


def pack(extents: Iterable[Extent]) -> bytes:
    return np.asarray(list(extents), "<i8").tobytes()


def unpack(data: bytes, pool_bytes: int) -> list[Extent]:
    """Return the decoded extents.

    :raises ValueError: if there are none or too many, or one is outside the pool.
    """
    if not data or len(data) % 16 or len(data) > 16 * MOST_EXTENTS:
        raise ValueError("there are no such extents")
    extents: npt.NDArray[np.int64] = np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 2)
    offsets, sizes = extents.T
    inside = (offsets >= 0) & (sizes > 0) & (sizes <= pool_bytes) & (offsets <= pool_bytes - sizes)
    if not inside.all() or sizes.sum() > pool_bytes:
        raise ValueError("pages beyond the sender's memory were offered")
    return [(offset, size) for offset, size in extents.tolist()]


def in_pieces(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Yield the pieces of extents, each as its parts; the cuts depend only on sizes."""
    piece: list[Extent] = []
    left_bytes = PIECE_BYTES
    for begin, size_bytes in extents:
        done_bytes = 0
        while done_bytes < size_bytes:
            part_bytes = min(size_bytes - done_bytes, left_bytes)
            piece.append((begin + done_bytes, part_bytes))
            done_bytes += part_bytes
            left_bytes -= part_bytes
            if not left_bytes or len(piece) == PIECE_PARTS:
                yield piece
                piece = []
                left_bytes = PIECE_BYTES
    if piece:
        yield piece


def checksum(views: Sequence[memoryview]) -> int:
    crc = 0
    for view in views:
        crc = crc32(view, crc)
    return crc


REQUEST_SECONDS = 10.0
"""The time in which the owner must receive a request."""

_REPLIES: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)


class TcpPages:
    """A :class:`.PageSource` that connects at its first pull, and again after a failed one.

    ::

        puller                                        owner
          │ ── ReadPages(transfer, extents) ─────────► │
          │ ◄── PieceHead(size, checksum), bytes ───── │  once for each piece
          │ ◄── ReadEnded("") ──────────────────────── │  the right was valid after the last byte

    Both sides divide the extents in the same way, so a piece needs no address.  A stopped pull
    closes the connection, so that its bytes cannot be mistaken for those of a later pull.

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
                # The reason is a right that was revoked during the read, or the network.
                following = channel.hear(_REPLIES, REPLY_BYTES, look)
                if isinstance(following, ReadEnded) and following.problem:
                    return following.problem
                raise ProtocolError("a piece was damaged in transit: its checksum differs")
        end = channel.hear(_REPLIES, REPLY_BYTES, look)
        if isinstance(end, PieceHead):
            raise ProtocolError("received more than was requested")
        return end.problem


PIECE_SECONDS = 10.0
"""The time in which a peer must receive a piece, or send a request, before its connection ends."""

_REQUESTS = msgspec.msgpack.Decoder(ReadPages)
_ENCODER = msgspec.msgpack.Encoder()


class PageServer(ServedPeers):
    """A server that sends local pages to peers with the right to read them.

    :param memory: the local pool, uint8 [pool_bytes]; it is read until :meth:`close` has returned.
    """

    def __init__(self, memory: Bytes, rights: Rights, piece_seconds: float = PIECE_SECONDS) -> None:
        super().__init__(self._send_pages, "kvell-pages")
        self._memory, self._rights = memory, rights
        self._piece_seconds = piece_seconds

    def _send_pages(self, instance: str, channel: BlockingSocket) -> None:
        request = channel.hear(_REQUESTS, REQUEST_BYTES, within(self._piece_seconds))
        problem = self._sent(instance, channel, request)
        channel.say(ReadEnded(problem), within(self._piece_seconds))

    def _sent(self, instance: str, channel: BlockingSocket, request: ReadPages) -> str:
        """Send all pages and return why they are invalid, or "".

        A system call copies its bytes before it returns, and revoked rights never become valid
        again.  So a right that is valid after the last call was valid for every byte.
        """
        try:
            extents = unpack(request.extents, len(self._memory))
        except ValueError as error:
            return str(error)
        if not self._rights.stands(request.number):
            return RIGHT_GONE
        if not self._rights.covers(request.number, instance, extents):
            return "these pages were not offered to it"
        memory = self._memory.data
        for parts in in_pieces(extents):
            if not self._rights.stands(request.number):
                return RIGHT_GONE
            views = [memory[offset : offset + size_bytes] for offset, size_bytes in parts]
            head = PieceHead(sum(view.nbytes for view in views), checksum(views))
            channel.send([frame(_ENCODER.encode(head)), *views], within(self._piece_seconds))
        return "" if self._rights.stands(request.number) else RIGHT_GONE
