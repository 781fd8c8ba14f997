"""What a request takes along when it moves to another instance."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from kvell.engine.protocol.messages import Cancel, Submit
from kvell.engine.requests.request import Request
from kvell.memory import MemoryCore

_SUBMITS = msgspec.msgpack.Decoder(Submit)


class Carried(msgspec.Struct, frozen=True):
    """What goes with a request's pages.

    :param output: tokens behind those computed.
    :param root: of its prefix, where it goes on.
    :param returns_to: the instance that gets its text when it has ended; "" for none.
    """

    output: list[int]
    cached_tokens: int
    preemptions: int
    root: str
    returns_to: str


@dataclass(frozen=True)
class Come:
    """A request that has come, with its pages under a handle."""

    command: Submit
    carried: Carried
    computed: int
    handle: int


def announcement(command: Submit, request: Request) -> bytes:
    """What is told of a request before its pages come: its command, with what it has emitted.

    The token that nobody has computed yet is not in it: that comes with the pages.
    """
    known = request.tokens(len(request.prompt), request.num_tokens)
    if request.is_decoding:
        known = known[:-1]
    output = np.ascontiguousarray(known, "<i4").tobytes()
    return msgspec.msgpack.encode(replace(command, goes_to="", pulls_from="", output=output))


def is_cancelled(announced: bytes, command: Cancel) -> bool:
    """Whether a command means the request of an announcement."""
    told = _SUBMITS.decode(announced)
    return told.request_id == command.request_id and not command.spares(told.attempt)


def carried(request: Request, root: str, returns_to: str) -> bytes:
    """What is told of a request whose announced tokens are computed."""
    beyond = request.tokens(request.computed, request.num_tokens).tolist()
    cached, preemptions = request.cached_tokens or 0, request.preemptions
    return msgspec.msgpack.encode(Carried(beyond, cached, preemptions, root, returns_to))


def come(announced: bytes, private: bytes, computed: int, handle: int) -> Come:
    """A request from what came with its pages."""
    told = msgspec.msgpack.decode(private, type=Carried)
    return Come(_SUBMITS.decode(announced), told, computed, handle)


def places_of(core: MemoryCore, request: Request) -> dict[tuple[int, int], int]:
    """(group, position) → page of all that a running request holds."""
    held = core.held_pages(request.handle)[:, 1:].tolist()
    return {(group, position): page for group, position, page in held}
