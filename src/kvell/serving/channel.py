"""The instance's end of the socket: whole frames out, commands in, and it never blocks."""

import socket
import threading
from collections.abc import Iterable

from kvell.engine.protocol.codec import decode_command, encode_frame
from kvell.engine.protocol.messages import Command, Event, Heartbeat
from kvell.wire.frames import FrameReader

READ_BYTES = 256 << 10


class PeerClosed(Exception):  # noqa: N818 - not an error: how a serving loop may end
    """The peer has closed its end."""


class Channel:
    """A non-blocking socket with a send buffer of limited size.

    Two threads may send, the loop and its heart.  A frame is appended to the buffer as a whole
    and under the lock, and only the buffer is sent, so frames are never interleaved.  Only the
    loop receives.
    """

    def __init__(self, sock: socket.socket, outgoing_limit_bytes: int) -> None:
        sock.setblocking(False)
        self.lock = threading.RLock()
        """Whoever holds it is alone with the buffer."""
        self._socket = sock
        self._limit_bytes = outgoing_limit_bytes
        self._reader = FrameReader()
        self._outgoing = bytearray()
        self._beat = b""

    @property
    def pending(self) -> bool:
        """Whether bytes wait for the peer."""
        return bool(self._outgoing)

    @property
    def full(self) -> bool:
        """Whether more bytes wait for the peer than should."""
        return len(self._outgoing) >= self._limit_bytes

    def queue(self, events: Iterable[Event]) -> None:
        """Send events, or keep them until the peer reads."""
        self.queue_frames(b"".join(encode_frame(event) for event in events))

    def queue_frames(self, frames: bytes) -> None:
        """Send whole frames, or keep them until the peer reads.

        :raises PeerClosed: when it has closed.
        """
        with self.lock:
            self._outgoing += frames
            self.flush()

    def beat(self, beat: Heartbeat) -> None:
        """Send a heartbeat.  A peer that does not read gets none: it would only fill the buffer.

        :raises PeerClosed: when it has closed.
        """
        if not self.full:
            self._beat = encode_frame(beat)
            self.queue_frames(self._beat)

    def beat_again(self) -> None:
        """Send the last heartbeat again, from another thread than the loop's.

        :raises PeerClosed: when the peer has closed.
        """
        self.offer_frame(self._beat)

    def offer_frame(self, frame: bytes) -> None:
        """Send a frame if nothing waits; else only send of that what the peer takes.

        :raises PeerClosed: when it has closed.
        """
        with self.lock:
            if not self._outgoing:
                self._outgoing += frame
            self.flush()

    def flush(self) -> None:
        """Send what the peer takes now.

        :raises PeerClosed: when it has closed.
        """
        with self.lock:
            try:
                while self._outgoing:
                    del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerClosed from error

    def receive(self) -> list[Command]:
        """Return the commands that are complete now.

        :raises PeerClosed: when the peer has closed.
        :raises ProtocolError: when it does not speak the protocol.
        """
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError as error:
            raise PeerClosed from error
        if not data:
            raise PeerClosed
        return [decode_command(body) for body in self._reader.feed(data)]
