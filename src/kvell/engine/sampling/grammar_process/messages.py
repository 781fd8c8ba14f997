"""What an instance and its grammar processes say to each other: msgpack in frames, in turn.

::

    instance                        template                     worker
       │ ── Load ──────────────────────► │
       │ ◄── Loaded ─────────────────── │
       │ ── Fork, with a socket ───────► │ ── forks ────────────────► │
       │ ◄── Forked ─────────────────── │                            │
       │ ── Check ────────────────────────────────────────────────► │
       │ ◄── Checked ────────────────────────────────────────────── │
       │ ── AskMasks ─────────────────────────────────────────────► │
       │ ◄── Mask, one for each request and in their order ──────── │
       │ ── End ───────────────────────► │ ── kills and reaps ──────► │
       │ ◄── Ended ──────────────────── │
"""

import socket
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvell.clock import MonotonicClock
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.errors import KvellError
from kvell.wire.decoding import MalformedError, decode
from kvell.wire.frames import FrameReader, ProtocolError, framed

READ_BYTES = 256 << 10
LEAST_SECONDS = 0.001


class LineEnded(KvellError):  # noqa: N818 - how a conversation may end
    """The other process has closed its end, or says what nobody understands."""


class LineLate(LineEnded):
    """The other process does not answer in time."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Load(_Message, frozen=True):
    """Load a tokenizer, from its JSON text in the form of the tokenizers library."""

    tokenizer_json: str
    end_token_ids: tuple[int, ...]


class Loaded(_Message, frozen=True):
    """The tokenizer is loaded, unless there is a problem with it.

    :param vocab_size: of the tokenizer; many models have logits for some more tokens.
    """

    vocab_size: int
    problem: str = ""


class Fork(_Message, frozen=True):
    """Fork a worker that serves the socket which comes with this message.

    :param room_bytes: that the worker may take beyond what it shares with the template.
    :param niceness: by how much it gives way to other processes.
    """

    room_bytes: int
    niceness: int


class Forked(_Message, frozen=True):
    """The worker's process id."""

    pid: int


class End(_Message, frozen=True):
    """Kill a worker unless it has ended, and reap it."""

    pid: int


class Ended(_Message, frozen=True):
    """The exit code of a worker, below 0 the signal that ended it; None if it is unknown here."""

    code: int | None


class Check(_Message, frozen=True):
    """Compile a grammar, and compute its first mask."""

    asked: StructuredOutputs


class Checked(_Message, frozen=True):
    """What is wrong with the grammar, in llguidance's words; "" if nothing is.

    :param unfollowed: keywords of its schemas that the grammar does not follow.
    """

    problem: str
    unfollowed: tuple[str, ...] = ()


class Need(_Message, frozen=True):
    """One request that needs a mask.

    :param asked: its constraint, where the worker does not know the request yet.
    :param fresh: the tokens of its output that the worker has not read, as little-endian int32.
    """

    handle: int
    fresh: bytes
    asked: StructuredOutputs | None = None


class AskMasks(_Message, frozen=True):
    """Forget some requests, and then compute masks for others."""

    forget: tuple[int, ...]
    needs: tuple[Need, ...]


class Mask(_Message, frozen=True):
    """Which tokens may come next in one request's output.

    :param kind: ``free``: any, it still reasons; ``over``: only tokens that end the answer;
        ``stuck``: none, the grammar is too complex or the output breaks it; else ``bits``.
    :param bits: one for each token of the tokenizer, the lowest bit of a byte first.
    :param also: a token that may come as well: it would begin the reasoning.
    """

    kind: Literal["free", "over", "stuck", "bits"]
    bits: bytes = b""
    also: int | None = None


Message = Load | Loaded | Fork | Forked | End | Ended | Check | Checked | AskMasks | Mask
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Line:
    """One end of a conversation, at a blocking stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._reader = sock, FrameReader()
        self._bodies: deque[bytes] = deque()
        self._clock = MonotonicClock()
        self._descriptors: list[int] = []

    def send(
        self, message: Message, seconds: float | None = None, descriptors: Sequence[int] = ()
    ) -> None:
        """Send a message whole, and descriptors beside it.

        :raises LineEnded: when the other end is closed, takes nothing for ``seconds``
            (:class:`LineLate`), or the message is too long.
        """
        try:
            frame = framed(_ENCODER.encode(message))
            self._socket.settimeout(seconds)
            sent = socket.send_fds(self._socket, [frame], descriptors) if descriptors else 0
            self._socket.sendall(frame[sent:])
        except TimeoutError as error:
            raise LineLate("it took nothing in time") from error
        except (OSError, ProtocolError) as error:
            raise LineEnded(str(error)) from error

    def receive(self, seconds: float | None = None) -> Message:
        """The next message.

        :raises LineEnded: when the other end is closed, says what is no message, or has not said
            a whole one within ``seconds`` (:class:`LineLate`).
        """
        until_seconds = None if seconds is None else self._clock.now_seconds() + seconds
        while not self._bodies:
            if until_seconds is not None:
                seconds = max(until_seconds - self._clock.now_seconds(), LEAST_SECONDS)
            self._socket.settimeout(seconds)
            self._read()
        try:
            return decode(_DECODER, self._bodies.popleft())
        except MalformedError as error:
            raise LineEnded(str(error)) from error

    def take_descriptor(self) -> int:
        """The descriptor that came with the last message."""
        return self._descriptors.pop()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, 1)
            self._descriptors += descriptors
            self._bodies += self._reader.feed(data)
        except TimeoutError as error:
            raise LineLate("it did not answer in time") from error
        except (OSError, ProtocolError) as error:
            raise LineEnded(str(error)) from error
        if not data:
            raise LineEnded("it has ended")
