"""Messages between an instance and its grammar processes: msgpack in frames, in turn.

::

    instance                        template                     worker
       │ ── Load ──────────────────────► │
       │ ◄── Loaded ─────────────────── │
       │ ── Fork, with a socket ───────► │ ── forks ────────────────► │
       │ ◄── Forked ─────────────────── │                            │
       │ ── Check ────────────────────────────────────────────────► │
       │ ◄── Checked ────────────────────────────────────────────── │
       │ ── AskMasks ─────────────────────────────────────────────► │
       │ ◄── Mask or DraftMasks, one for each request, in order ─── │
       │ ── End ───────────────────────► │ ── kills and reaps ──────► │
       │ ◄── Ended ──────────────────── │
"""

import socket
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvell.clock import MonotonicClock
from kvell.engine.protocol.schemas.strict import StrictViolation
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.errors import KvellError
from kvell.wire.decoding import MalformedError, decode
from kvell.wire.frames import FrameReader, ProtocolError, frame

READ_BYTES = 256 << 10
LEAST_SECONDS = 0.001
DRAFTS_SECONDS = 0.005
"""The processor time after which no further draft token of an answer gets a mask."""


class LineEnded(KvellError):  # noqa: N818 - a conversation may end so
    """The end of a conversation: the other process has closed it, or sent an invalid message."""


class LineLate(LineEnded):
    """The end of a conversation: the other process did not answer in time."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Load(_Message, frozen=True):
    """The command to load a tokenizer from the JSON text of the tokenizers library."""

    tokenizer_json: str
    end_token_ids: tuple[int, ...]


class Loaded(_Message, frozen=True):
    """The answer to :class:`Load`: a problem, or "" if the tokenizer is loaded.

    :param vocab_size: the tokenizer's; many models have logits for more tokens.
    """

    vocab_size: int
    problem: str = ""


LOWEST = 19


class Fork(_Message, frozen=True):
    """The command to fork a worker for the socket that is sent with this message.

    :param room_bytes: memory that the worker may take beyond the template's.
    :param niceness: increment of the worker's nice value; at :data:`LOWEST` it takes no processor
        that another process could use.
    """

    room_bytes: int
    niceness: int


class Forked(_Message, frozen=True):
    """The answer to :class:`Fork`, with the worker's process id."""

    pid: int


class End(_Message, frozen=True):
    """The command to kill a worker, unless it has ended, and reap it."""

    pid: int


class Ended(_Message, frozen=True):
    """A worker's exit code; below 0 a signal; None if the template has no such worker."""

    code: int | None


class Check(_Message, frozen=True):
    """The command to compile a grammar and compute its first mask."""

    asked: StructuredOutputs


class Checked(_Message, frozen=True):
    """The answer to :class:`Check`: llguidance's error, or "".

    :param unfollowed: keywords of schemas that the grammar does not enforce.
    """

    problem: str
    unfollowed: tuple[str, ...] = ()
    violation: StrictViolation | None = None
    seconds: float = 0.0


class Need(_Message, frozen=True):
    """An answer that needs a mask.

    :param number: the answer's, unique in its worker.
    :param seconds: the most processor time for it.
    :param fresh: output tokens that the worker has not read, as little-endian int32.
    :param asked: its constraint, if the answer is new to the worker.
    :param drafts: draft tokens after the output, as little-endian int32, if only the masks after
        each of them are needed.
    """

    number: int
    seconds: float
    fresh: bytes
    asked: StructuredOutputs | None = None
    drafts: bytes = b""


class AskMasks(_Message, frozen=True):
    """The command to drop some answers, and then compute masks for others."""

    forget: tuple[int, ...]
    needs: tuple[Need, ...]


class Mask(_Message, frozen=True):
    """The tokens that are allowed next in a request's output.

    :param kind: ``free``: any, in reasoning; ``over``: only tokens that end the answer; ``stuck``:
        none, as the grammar is too complex or the output violates it; else ``bits``.
    :param bits: one bit for each token of the tokenizer, the lowest bit of a byte first.
    :param also: a further allowed token, which begins the reasoning.
    """

    kind: Literal["free", "over", "stuck", "bits"]
    bits: bytes = b""
    also: int | None = None
    seconds: float = 0.0


class DraftMasks(_Message, frozen=True):
    """The masks after each of an answer's draft tokens, up to the first that the grammar refuses.

    They are fewer if they take long, or the grammar is too complex after a draft token.

    :param is_lost: whether the worker has lost the answer's position.
    """

    masks: tuple[Mask, ...]
    seconds: float = 0.0
    is_lost: bool = False


Message = (
    Load | Loaded | Fork | Forked | End | Ended | Check | Checked | AskMasks | Mask | DraftMasks
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Line:
    """One end of a conversation over a blocking stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._reader = FrameReader()
        self._bodies: deque[bytes] = deque()
        self._clock = MonotonicClock()
        self.descriptors: list[int] = []

    def send(
        self, message: Message, seconds: float | None = None, descriptors: Sequence[int] = ()
    ) -> None:
        """Send a whole message, and descriptors with it.

        :raises LineEnded: if the other end is closed or reads nothing for ``seconds``
            (:class:`LineLate`), or the message is too long.
        """
        try:
            data = frame(_ENCODER.encode(message))
            self.socket.settimeout(seconds)
            sent = socket.send_fds(self.socket, [data], descriptors) if descriptors else 0
            self.socket.sendall(data[sent:])
        except TimeoutError as error:
            raise LineLate("it accepted no input in time") from error
        except (OSError, ProtocolError) as error:
            raise LineEnded(str(error)) from error

    def receive(self, seconds: float | None = None) -> Message:
        """Return the next message.

        :raises LineEnded: if the other end is closed, sends an invalid message, or sends no whole
            message within ``seconds`` (:class:`LineLate`).
        """
        until_seconds = None if seconds is None else self._clock.now_seconds() + seconds
        while not self._bodies:
            if until_seconds is not None:
                seconds = max(until_seconds - self._clock.now_seconds(), LEAST_SECONDS)
            self.socket.settimeout(seconds)
            self._read()
        try:
            return decode(_DECODER, self._bodies.popleft())
        except MalformedError as error:
            raise LineEnded(str(error)) from error

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, READ_BYTES, 1)
            self.descriptors += descriptors
            self._bodies += self._reader.feed(data)
        except TimeoutError as error:
            raise LineLate("it did not answer in time") from error
        except (OSError, ProtocolError) as error:
            raise LineEnded(str(error)) from error
        if not data:
            raise LineEnded("it has ended")
