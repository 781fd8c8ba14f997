"""A non-blocking connection: it sends whole frames from a buffer, and receives frames."""

import socket

from kvell.wire.frames import MAX_FRAME_BYTES, FrameReader

READ_BYTES = 256 << 10


class PeerClosedError(Exception):
    """The signal that the peer has closed the connection, or that it failed."""


class BufferedSocket:
    """A non-blocking socket with a send buffer; the caller limits its size."""

    def __init__(self, sock: socket.socket, most_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._reader = FrameReader(most_frame_bytes)
        self._outgoing = bytearray()

    @property
    def unsent_bytes(self) -> int:
        return len(self._outgoing)

    def send(self, frames: bytes | bytearray) -> None:
        """Send whole frames, or buffer them until the peer reads.

        :raises PeerClosedError: if the connection has ended.
        """
        self._outgoing += frames
        self.flush()

    def flush(self) -> None:
        """Send as much of the buffer as the socket accepts now.

        :raises PeerClosedError: if the connection has ended.
        """
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerClosedError(f"it closed the connection ({error})") from error

    def receive(self) -> list[bytes]:
        """Return the bodies of the frames that are complete now.

        :raises PeerClosedError: if the connection has ended.
        :raises ProtocolError: if the peer violates the protocol.
        """
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise PeerClosedError(f"it closed the connection ({error})") from error
        if not data:
            raise PeerClosedError("it closed the connection")
        return self._reader.feed(data)
