"""The instance's end of a non-blocking socket: it sends whole frames and receives commands."""

import socket
import threading
from collections.abc import Iterable

from kvell.engine.protocol.codec import decode_command, encode_frame
from kvell.engine.protocol.messages import Command, Event, Heartbeat
from kvell.wire.buffered import BufferedSocket


class Channel:
    """A non-blocking socket with a send buffer of limited size.

    Two threads may send: the loop and the heartbeat thread.  Whole frames are appended to the
    buffer under the lock, and only the buffer is sent, so frames are never interleaved.  Only
    the loop receives.
    """

    def __init__(self, sock: socket.socket, outgoing_limit_bytes: int) -> None:
        self.lock = threading.RLock()
        """The lock of the send buffer."""
        self._line = BufferedSocket(sock)
        self._limit_bytes = outgoing_limit_bytes
        self._beat = b""

    @property
    def pending(self) -> bool:
        """Whether unsent bytes are buffered."""
        return self._line.unsent_bytes > 0

    @property
    def full(self) -> bool:
        """Whether the unsent bytes have reached the limit."""
        return self._line.unsent_bytes >= self._limit_bytes

    def queue(self, events: Iterable[Event]) -> None:
        self.queue_frames(b"".join(encode_frame(event) for event in events))

    def queue_frames(self, frames: bytes) -> None:
        """Send whole frames, or buffer them until the peer reads.

        :raises PeerClosedError: if the peer has closed.
        """
        with self.lock:
            self._line.send(frames)

    def beat(self, beat: Heartbeat) -> None:
        """Send a heartbeat, unless the buffer is full.

        :raises PeerClosedError: if the peer has closed.
        """
        if not self.full:
            self._beat = encode_frame(beat)
            self.queue_frames(self._beat)

    def beat_again(self) -> None:
        """Send the last heartbeat again, from the heartbeat thread.

        :raises PeerClosedError: if the peer has closed.
        """
        self.offer_frame(self._beat)

    def offer_frame(self, frame: bytes) -> None:
        """Send a frame if the buffer is empty; else drop the frame and flush the buffer.

        :raises PeerClosedError: if the peer has closed.
        """
        with self.lock:
            self._line.send(b"" if self.pending else frame)

    def flush(self) -> None:
        """Send as much of the buffer as the socket accepts now.

        :raises PeerClosedError: if the peer has closed.
        """
        with self.lock:
            self._line.flush()

    def receive(self) -> list[Command]:
        """Return the commands that have arrived completely.

        :raises PeerClosedError: if the peer has closed.
        :raises ProtocolError: if the peer violates the protocol.
        """
        return [decode_command(body) for body in self._line.receive()]
