"""The owner's side of connections for pages."""

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
    unpack,
)
from kvell.mempool.transports.tcp.served_peers import ServedPeers
from kvell.wire.blocking import BlockingSocket, within
from kvell.wire.frames import frame

PIECE_SECONDS = 10.0
"""The time in which a peer must receive a piece, or send a request, before its connection ends."""

_REQUESTS = msgspec.msgpack.Decoder(ReadPages)
_ENCODER = msgspec.msgpack.Encoder()


class PageServer:
    """A server that sends local pages to peers with the right to read them.

    :param memory: the local pool, uint8 [pool_bytes]; it is read until :meth:`close` has returned.
    :param piece_seconds: the timeout of each piece.
    """

    def __init__(self, memory: Bytes, rights: Rights, piece_seconds: float = PIECE_SECONDS) -> None:
        self._memory, self._rights = memory, rights
        self._piece_seconds = piece_seconds
        self._peers = ServedPeers(self._answer, "kvell-pages")

    def __len__(self) -> int:
        return len(self._peers)

    def serve(self, instance: str, channel: BlockingSocket) -> None:
        self._peers.answer_peer(instance, channel)

    def close(self) -> None:
        """Close all connections, and wait until no page is read any more."""
        self._peers.close()

    def _answer(self, instance: str, channel: BlockingSocket) -> None:
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
