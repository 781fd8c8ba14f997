"""The messages between fronts and the manager of their cluster.

msgpack in frames, over a connection on which both sides have proved that they have the secret::

    front                                    manager
      │ ── proves the secret ────────────────► │  purpose "cluster"; the greeting names the front
      │ ◄── Roster ─────────────────────────── │  immediately, at each change, and periodically
      │ ── FrontBeat(loads, roles, used) ────► │  periodically, as a sign of life
      │ ── ScaleInstances, DrainInstance ────► │
      │ ◄── MoveRequest(epoch) ─────────────── │  a request continues at another instance
      │ ◄── Answer(call) ───────────────────── │  exactly once for each call
      │ ── Leave ────────────────────────────► │  the front ends on purpose

Requests never pass through the manager: fronts connect to the instances that a roster names.  Both
sides may lose the connection and reconnect: a roster is complete, and a beat has all that a new
manager needs.
"""

from typing import Annotated

import msgspec

from kvell.cluster.instance_load import Movable
from kvell.cluster.routed_request import Cause
from kvell.fleet.fleet import InstanceState
from kvell.wire.decoding import decode
from kvell.wire.frames import frame

MANAGER = "manager"
"""The manager's name in its greetings."""
ROSTER_SECONDS = 1.0
"""Longest time between two rosters."""
BEAT_SECONDS = 0.5
"""Time between two beats of a front."""
MOST_KEYS_TOLD = 256
"""Most keys whose use a beat contains."""
MOST_MOVABLE = 8
"""Most requests of an instance that a beat names."""
NAME_DIGITS = 16
"""Hexadecimal digits that name a key in a beat."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class KeyUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The use of a key at a front, in total since the front started.

    :param tokens: tokens of these requests, less what was given back.
    :param missing_requests: what the front's account, with all fronts counted, lacks of the full
        limit now; ``missing_tokens`` the same.
    """

    requests: Count = 0
    tokens: Count = 0
    in_flight: Count = 0
    missing_requests: Count = 0
    missing_tokens: Count = 0


KeyName = Annotated[str, msgspec.Meta(max_length=NAME_DIGITS)]
KeyUsesByName = Annotated[dict[KeyName, KeyUse], msgspec.Meta(max_length=MOST_KEYS_TOLD)]


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of an incarnation of an instance, for fronts that lost it."""

    incarnation: int
    problem: str
    cause: Cause


class RosterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance of a roster.

    :param role: current role; the first role is in the name.
    :param state: as the manager sees it; fronts use an instance that is ``serving``.
    :param incarnation: of the newest start; fronts use no other.
    :param address: where the instance listens for fronts; "" while it does not.
    :param pid: of the process there; 0 while there is none.
    :param ended: the end of the last incarnation, if one has ended.
    """

    instance_id: str
    role: str
    state: InstanceState
    incarnation: int = 0
    address: str = ""
    host: str = ""
    pid: int = 0
    restarts: int = 0
    ended: Ended | None = None


class Roster(_Message, frozen=True):
    """All instances; a roster replaces the one before.

    :param epoch: of the manager; a front that has seen a higher one ignores the roster.
    :param role_changes: number of role changes so far; the larger number is the newer roster.
    :param is_starting: whether the first instances are not all ready yet.
    :param failed: why the cluster cannot start; "" if it can.  ``exit_code`` is the status of the
        instance that ended, or None.
    :param waits_for: what starting instances wait for; "" if they wait for nothing.
    """

    manager: int
    instances: tuple[RosterEntry, ...]
    role_changes: int = 0
    is_starting: bool = False
    failed: str = ""
    exit_code: int | None = None
    used: dict[str, KeyUsesByName] = {}
    waits_for: str = ""
    epoch: Count = 0


class Pressed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A front's requests at an instance that is short of memory.

    :param movable: requests that could move; if there are many, the youngest.
    """

    leaving: Count = 0
    movable: Annotated[tuple[Movable, ...], msgspec.Meta(max_length=MOST_MOVABLE)] = ()


class MoveRequest(_Message, frozen=True):
    """An order to continue a request at another instance, ignored if it has ended or moves.

    :param epoch: of the manager; a front that has seen a higher one ignores the order.
    :param num_blocks: 0: move the whole request; else lend this number of its sections there.
    """

    epoch: int
    request_id: str
    target: str
    num_blocks: Count = 0


class FrontBeat(_Message, frozen=True):
    """A heartbeat of a front, with its state.

    :param loads: remaining work of this front at instances with a part of the work, as of
        :attr:`kvell.cluster.instance_load.InstanceLoad.work`; mixed instances are left out.
    :param roles: role of each instance that the front has, as of ``role_changes``.
    :param epoch: the highest epoch of a manager that the front has seen.
    :param pressed: instances that are short of memory, and the front's requests there.
    :param coming: number of the front's requests that are moving to an instance, if any.
    """

    loads: dict[str, int] = {}
    roles: dict[str, str] = {}
    role_changes: int = 0
    used: KeyUsesByName = {}
    epoch: Count = 0
    pressed: dict[str, Pressed] = {}
    coming: dict[str, Count] = {}


class ScaleInstances(_Message, frozen=True):
    """A call to add or drain instances until each role in ``instances`` has its number."""

    call: int
    instances: dict[str, int]


class DrainInstance(_Message, frozen=True):
    """A call to take an instance out of service."""

    call: int
    instance_id: str


class Leave(_Message, frozen=True):
    """The announcement that a front ends.  The manager disconnects the front afterwards; when the
    cluster ends with the front, it ends the cluster first.

    :param ends_cluster: whether the cluster should end if no other front is connected now.
    """

    ends_cluster: bool = False


class Answer(_Message, frozen=True):
    """The answer that a call was carried out, or must be changed.

    :param field: what must be changed; "" if the call was carried out.  ``value``, ``problem`` and
        ``remedy`` are as of :class:`kvell.errors.ChangeSomething`.
    """

    call: int
    field: str = ""
    value: str = ""
    problem: str = ""
    remedy: str = ""


ToManager = FrontBeat | ScaleInstances | DrainInstance | Leave
ToFront = Roster | MoveRequest | Answer
_ENCODER = msgspec.msgpack.Encoder()
_TO_MANAGER = msgspec.msgpack.Decoder(ToManager)
_TO_FRONT = msgspec.msgpack.Decoder(ToFront)


def encode_message(message: ToManager | ToFront) -> bytes:
    return frame(_ENCODER.encode(message))


def decode_to_manager(body: bytes) -> ToManager:
    """Decode a message of a front.

    :raises ProtocolError: for anything that is not exactly one well-typed message.
    """
    message: ToManager = decode(_TO_MANAGER, body)
    return message


def decode_to_front(body: bytes) -> ToFront:
    """Decode a message of the manager; errors as in :func:`decode_to_manager`."""
    message: ToFront = decode(_TO_FRONT, body)
    return message
