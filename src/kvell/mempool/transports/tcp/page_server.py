"""The owner's side of connections for pages: each is served on a thread of its own."""

import contextlib
import threading

import msgspec

from kvell.mempool.transports.page_copies import Bytes
from kvell.mempool.transports.rights import Rights
from kvell.mempool.transports.source import RIGHT_GONE
from kvell.mempool.transports.tcp.reading import (
    REQUEST_BYTES,
    PieceHead,
    ReadEnded,
    ReadPages,
    checksum,
    in_pieces,
    unpacked,
)
from kvell.wire.blocking import BlockingSocket, within
from kvell.wire.frames import ProtocolError, framed

MOST_READERS = 64
"""Connections for pages; further ones are not served."""
PIECE_SECONDS = 10.0
"""A peer that does not take a piece in this time, or ask in it, is given up."""

_REQUESTS = msgspec.msgpack.Decoder(ReadPages)
_ENCODER = msgspec.msgpack.Encoder()


class PageServer:
    """Sends own pages to peers that have the right to read them.

    :param memory: own pool, uint8 [pool_bytes]; it is read until :meth:`close` has returned.
    :param piece_seconds: for each piece.
    """

    def __init__(self, memory: Bytes, rights: Rights, piece_seconds: float = PIECE_SECONDS) -> None:
        self._memory, self._rights = memory, rights
        self._piece_seconds = piece_seconds
        self._lock = threading.Lock()
        self._served: dict[str, BlockingSocket] = {}
        self._threads: dict[BlockingSocket, threading.Thread] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._threads)

    def serve(self, instance: str, channel: BlockingSocket) -> None:
        """Answer a peer until it hangs up; a connection that it had before ends."""
        thread = threading.Thread(
            target=self._run, args=(instance, channel), name="kvell-pages", daemon=True
        )
        with self._lock:
            if self._is_closed or len(self._threads) >= MOST_READERS:
                channel.close()
                return
            if instance in self._served:
                self._served[instance].hang_up()
            self._served[instance] = channel
            self._threads[channel] = thread
            thread.start()

    def close(self) -> None:
        """Hang up, and wait until no page is read any more."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.values())
            for channel in self._threads:
                channel.hang_up()
        for thread in threads:
            thread.join()

    def _run(self, instance: str, channel: BlockingSocket) -> None:
        try:
            with contextlib.suppress(OSError, ProtocolError):  # the puller sees that it ended
                while True:
                    channel.wait()
                    look = within(self._piece_seconds)
                    self._answer(instance, channel, channel.hear(_REQUESTS, REQUEST_BYTES, look))
        finally:
            with self._lock:
                del self._threads[channel]
                if self._served.get(instance) is channel:
                    del self._served[instance]
            channel.close()

    def _answer(self, instance: str, channel: BlockingSocket, request: ReadPages) -> None:
        problem = self._sent(instance, channel, request)
        channel.say(ReadEnded(problem), within(self._piece_seconds))

    def _sent(self, instance: str, channel: BlockingSocket, request: ReadPages) -> str:
        """Send everything; why it does not count, or "".

        What a call of the system takes is copied before it returns.  So a right that stands after
        the last one stood at every byte: rights that have gone never come back.
        """
        try:
            extents = unpacked(request.extents, len(self._memory))
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
            channel.send([framed(_ENCODER.encode(head)), *views], within(self._piece_seconds))
        return "" if self._rights.stands(request.number) else RIGHT_GONE
