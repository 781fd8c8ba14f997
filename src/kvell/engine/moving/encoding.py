"""Encoding of a request that moves to another instance."""

from dataclasses import dataclass, replace

import msgspec

from kvell.engine.protocol.messages import Cancel, Submit
from kvell.engine.protocol.request_spec import to_token_bytes
from kvell.engine.requests.request import Request
from kvell.memory import MemoryCore
from kvell.mempool.transfers.messages import Offer, Prepare
from kvell.vocabulary import PageId
from kvell.wire.decoding import MalformedError, decode

_SUBMITS = msgspec.msgpack.Decoder(Submit)


class Handover(msgspec.Struct, frozen=True):
    """State of a request that is sent with its pages.

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
    """A request that has arrived, with its pages under a handle."""

    command: Submit
    handover: Handover
    computed: int
    handle: int


def encode_announcement(command: Submit, request: Request) -> bytes:
    """Encode the announcement of a request, sent before its pages: its command with its output.

    The newest token is not in it: it is not computed yet, and is sent with the pages.
    """
    tokens = request.tokens(len(request.prompt), request.num_tokens)
    if request.is_decoding:
        tokens = tokens[:-1]
    output = to_token_bytes(tokens)
    return msgspec.msgpack.encode(replace(command, goes_to="", pulls_from="", output=output))


def is_legible(message: Prepare | Offer) -> bool:
    try:
        decode(_SUBMITS if isinstance(message, Prepare) else _HANDOVERS, message.private)
    except MalformedError:
        return False
    return True


def is_cancelled(announced: bytes, command: Cancel) -> bool:
    submit = decode(_SUBMITS, announced)
    return submit.request_id == command.request_id and not command.spares(submit.attempt)


def encode_handover(request: Request, root: str, returns_to: str) -> bytes:
    beyond = request.tokens(request.computed, request.num_tokens).tolist()
    cached = request.cached_tokens or 0
    preemptions = request.preemptions
    return msgspec.msgpack.encode(Handover(beyond, cached, preemptions, root, returns_to))


def decode_arrival(announced: bytes, private: bytes, computed: int, handle: int) -> ArrivedRequest:
    handover = decode(_HANDOVERS, private)
    return ArrivedRequest(decode(_SUBMITS, announced), handover, computed, handle)


def places_of(core: MemoryCore, request: Request) -> dict[tuple[int, int], PageId]:
    """Return (group, position) → page for all pages of a running request."""
    held = core.held_pages(request.handle)[:, 1:].tolist()
    return {(group, position): page for group, position, page in held}
