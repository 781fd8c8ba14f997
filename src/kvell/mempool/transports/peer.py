"""One connected instance: its messages, and the source of its pages."""

import socket

import msgspec

from kvell.mempool.transfers.messages import PeerMessage
from kvell.mempool.transports.source import PageSource
from kvell.mempool.transports.tcp.partials import PartialsLine
from kvell.wire.decoding import decode
from kvell.wire.frames import FrameReader, ProtocolError, frame
from kvell.wire.greeting import Greeting

READ_BYTES = 256 << 10
OUTGOING_LIMIT_BYTES = 64 << 20
"""The limit of unsent bytes, beyond which a peer that does not read counts as lost."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PeerMessage)


class PeerGone(Exception):  # noqa: N818 - how a connection may end
    """The peer hung up or violated the protocol, as the message says."""


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
        self.told, self.socket, self.source, self.partials = greeting, sock, source, partials
        self._reader, self._outgoing = FrameReader(), bytearray()
        sock.setblocking(False)

    @property
    def pending(self) -> bool:
        """Whether unsent bytes wait until the peer reads."""
        return bool(self._outgoing)

    def send(self, message: PeerMessage) -> None:
        """Send a message, or queue it until the peer reads.

        :raises PeerGone: when the peer closed the connection, or does not read.
        """
        self._outgoing += frame(_ENCODER.encode(message))
        self.flush()
        if len(self._outgoing) > OUTGOING_LIMIT_BYTES:
            raise PeerGone("it does not read its messages")

    def flush(self) -> None:
        """Send queued bytes without blocking.

        :raises PeerGone: when the peer closed the connection.
        """
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerGone(f"it closed the connection ({error})") from error

    def receive(self) -> list[PeerMessage]:
        """Return the messages that are complete now.

        :raises PeerGone: when the peer closed the connection or violated the protocol.
        """
        try:
            data = self.socket.recv(READ_BYTES)
            bodies = self._reader.feed(data)
            if not data:
                raise PeerGone("it closed the connection")
            return [decode(_DECODER, body) for body in bodies]
        except BlockingIOError:
            return []
        except (OSError, ProtocolError) as error:
            raise PeerGone(str(error)) from error

    def close(self) -> None:
        """Close all connections to the peer."""
        self.source.close()
        if self.partials is not None:
            self.partials.close()
        self.socket.close()
