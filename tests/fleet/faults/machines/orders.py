"""What a manager, the machines of a test and their nodes say to each other: msgpack in frames."""

from pathlib import Path
from typing import Literal

import msgspec

from kvell.fleet.placing.placement import IncarnationEnd, InstancePlace, PlacedInstance
from kvell.wire.frames import frame

What = Literal["found", "enter", "leave", "start", "ended", "stop", "close"]
READ_BYTES = 64 << 10
ROOT = Path(__file__).parents[4]
"""Where processes of the tests are started: they are modules, named from here."""


class Order(msgspec.Struct, frozen=True):
    """One call of a :class:`.Placement`.

    :param call: comes back in the reply.
    """

    call: int
    what: What
    instance_id: str = ""
    incarnation: int = 0
    words: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True):
    """What came of it.

    :param problem: says that the machine does not answer.
    """

    call: int
    found: tuple[PlacedInstance, ...] = ()
    placed: InstancePlace | None = None
    ended: IncarnationEnd | None = None
    problem: str = ""


_ENCODER = msgspec.msgpack.Encoder()
_ORDER, _REPLY = msgspec.msgpack.Decoder(Order), msgspec.msgpack.Decoder(Reply)


def encoded(message: Order | Reply) -> bytes:
    return frame(_ENCODER.encode(message))


def order_of(body: bytes) -> Order:
    return _ORDER.decode(body)


def reply_of(body: bytes) -> Reply:
    return _REPLY.decode(body)
