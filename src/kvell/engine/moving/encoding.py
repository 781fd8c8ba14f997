"""Messages about a request that moves to another instance: what it takes along."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from kvell.engine.protocol.messages import Cancel, Submit
from kvell.engine.requests.request import Request
from kvell.memory import MemoryCore
from kvell.mempool.transfers.messages import Offer, Prepare
from kvell.wire.decoding import MalformedError, decode

_SUBMITS = msgspec.msgpack.Decoder(Submit)


class Handover(msgspec.Struct, frozen=True):
    """State of a request that goes with its pages.

    :param output: tokens behind those computed.
    :param root: of its prefix, where it goes on.
    :param returns_to: the instance that gets its text when it has ended; "" for none.
    """

    output: list[int]
    cached_tokens: int
    preemptions: int
    root: str
    returns_to: str


_HANDOVERS = msgspec.msgpack.Decoder(Handover)


@dataclass(frozen=True)
class ArrivedRequest:
    """A request that has come, with its pages under a handle."""

    command: Submit
    handover: Handover
    computed: int
    handle: int


def encode_announcement(command: Submit, request: Request) -> bytes:
    """Encode what another instance gets before a request's pages: its command, with its output.

    The token that nobody has computed yet is not in it: that comes with the pages.
    """
    known = request.tokens(len(request.prompt), request.num_tokens)
    if request.is_decoding:
        known = known[:-1]
    output = np.ascontiguousarray(known, "<i4").tobytes()
    return msgspec.msgpack.encode(replace(command, goes_to="", pulls_from="", output=output))


def is_legible(message: Prepare | Offer) -> bool:
    """Whether what a message says of a request can be read when the request is here."""
    try:
        decode(_SUBMITS if isinstance(message, Prepare) else _HANDOVERS, message.private)
    except MalformedError:
        return False
    return True


def is_cancelled(announced: bytes, command: Cancel) -> bool:
    """Whether a command means the request of an announcement."""
    told = decode(_SUBMITS, announced)
    return told.request_id == command.request_id and not command.spares(told.attempt)


def encode_handover(request: Request, root: str, returns_to: str) -> bytes:
    """Encode what goes with the pages of a request whose announced tokens are computed."""
    beyond = request.tokens(request.computed, request.num_tokens).tolist()
    cached, preemptions = request.cached_tokens or 0, request.preemptions
    return msgspec.msgpack.encode(Handover(beyond, cached, preemptions, root, returns_to))


def decode_arrival(announced: bytes, private: bytes, computed: int, handle: int) -> ArrivedRequest:
    """Decode a request from what came before its pages, and with them."""
    told = decode(_HANDOVERS, private)
    return ArrivedRequest(decode(_SUBMITS, announced), told, computed, handle)


def places_of(core: MemoryCore, request: Request) -> dict[tuple[int, int], int]:
    """(group, position) → page of all that a running request holds."""
    held = core.held_pages(request.handle)[:, 1:].tolist()
    return {(group, position): page for group, position, page in held}
