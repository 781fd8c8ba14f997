"""One connected instance: its messages, and the source of its pages."""

import socket

import msgspec

from kvell.mempool.transfers.messages import PeerMessage
from kvell.mempool.transports.source import PageSource
from kvell.mempool.transports.tcp.partials import PartialsLine
from kvell.wire.buffered import BufferedSocket, PeerClosedError
from kvell.wire.decoding import decode
from kvell.wire.frames import ProtocolError, frame
from kvell.wire.greeting import Greeting

OUTGOING_LIMIT_BYTES = 64 << 20
"""The limit of unsent bytes, beyond which a peer that does not read counts as lost."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PeerMessage)


class Peer:
    """A connected peer with a non-blocking socket.

    :param source: the source of its pages; closed with the peer.
    :param partials: the line for attention over its lent pages, if any; closed with the peer.
    """

    def __init__(
        self,
        sock: socket.socket,
        greeting: Greeting,
        source: PageSource,
        partials: PartialsLine | None = None,
    ) -> None:
        self.greeting, self.socket, self.source, self.partials = greeting, sock, source, partials
        self.line = BufferedSocket(sock)

    @property
    def pending(self) -> bool:
        """Whether unsent bytes wait until the peer reads."""
        return self.line.unsent_bytes > 0

    def send(self, message: PeerMessage) -> None:
        """Send a message, or queue it until the peer reads.

        :raises PeerClosedError: when the peer closed the connection, or does not read.
        """
        self.line.send(frame(_ENCODER.encode(message)))
        if self.line.unsent_bytes > OUTGOING_LIMIT_BYTES:
            raise PeerClosedError("it does not read its messages")

    def receive(self) -> list[PeerMessage]:
        """Return the messages that are complete now.

        :raises PeerClosedError: when the peer closed the connection or violated the protocol.
        """
        try:
            return [decode(_DECODER, body) for body in self.line.receive()]
        except ProtocolError as error:
            raise PeerClosedError(str(error)) from error

    def close(self) -> None:
        self.source.close()
        if self.partials is not None:
            self.partials.close()
        self.socket.close()
