"""What fronts and the manager of their cluster say to each other.

msgpack in frames, over a connection on which both have proved that they know the cluster's secret::

    front                                    manager
      │ ── proves the secret ────────────────► │  purpose "cluster"; the greeting names the front
      │ ◄── Roster ─────────────────────────── │  at once, at each change, and now and then
      │ ── FrontBeat(loads, roles, used) ────► │  now and then: it lives
      │ ── ScaleInstances, DrainInstance ────► │
      │ ◄── MoveRequest(epoch) ─────────────── │  it goes on at another instance
      │ ◄── Answer(call) ───────────────────── │  exactly once for each
      │ ── Leave ────────────────────────────► │  it ends on purpose

Requests never pass through the manager: fronts connect to the instances that a roster names.  Both
sides can lose each other and meet again: a roster is whole, and a beat says all that a manager
that has just started must know.
"""

from typing import Annotated

import msgspec

from kvell.fleet.instance.death import Cause
from kvell.fleet.instance.supervisor import InstanceState
from kvell.wire.decoding import decode
from kvell.wire.frames import framed

MANAGER = "manager"
"""The manager's name in its greetings."""
ROSTER_SECONDS = 1.0
"""The manager sends a roster at least this often."""
BEAT_SECONDS = 0.5
"""A front sends a beat this often."""
MOST_KEYS_TOLD = 256
"""Keys that a beat tells the use of at most."""
MOST_MOVABLE = 8
"""Requests of an instance that a beat names at most."""
NAME_DIGITS = 16
"""Hexadecimal digits that name a key there."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class KeyUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a key used at a front, in all since that has started.

    :param requests: that it let in.
    :param tokens: of these, less what was given back.
    :param in_flight: sequences that wait or run now.
    :param missing_requests: what is missing now from the whole limit there, all fronts counted;
        ``missing_tokens`` likewise.
    """

    requests: Count = 0
    tokens: Count = 0
    in_flight: Count = 0
    missing_requests: Count = 0
    missing_tokens: Count = 0


KeyName = Annotated[str, msgspec.Meta(max_length=NAME_DIGITS)]
KeyUsesByName = Annotated[dict[KeyName, KeyUse], msgspec.Meta(max_length=MOST_KEYS_TOLD)]


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an incarnation of an instance ended, for fronts that lost it.

    :param problem: a sentence for logs and answers.
    """

    incarnation: int
    problem: str
    cause: Cause


class RosterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance.

    :param instance_id: its name, like ``decode-0``.
    :param role: what it does now; its first role is in its name.
    :param state: as the manager sees it; fronts use one that is ``serving``.
    :param incarnation: of its newest start; no other may be used.
    :param address: where it listens for fronts; "" while it does not.
    :param host: the machine that it runs on.
    :param pid: of its process there; 0 while it has none.
    :param restarts: how often it was started again.
    :param ended: how its last incarnation ended, if one did.
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
    """All instances; it replaces the one before.

    :param manager: tells this start of the manager from its other starts.
    :param epoch: of the manager; a front that has seen a higher one follows it no more.
    :param role_changes: number of role changes so far; the larger number is the newer roster.
    :param is_starting: whether the first instances are not all ready yet.
    :param failed: why the cluster cannot start; "" if it can.  ``exit_code`` is the status of the
        instance that ended, or None.
    :param used: what keys used at each front that is there.
    :param waits_for: what instances that start wait for; "" if they are just started.
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


class Movable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that could go on elsewhere.

    :param size_bytes: of its pages, at most.
    """

    request_id: str
    size_bytes: Count


class Pressed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a front has at an instance that is short of memory.

    :param leaving: requests that are on their way from it.
    :param movable: those that could be; the youngest, of many.
    """

    leaving: Count = 0
    movable: Annotated[tuple[Movable, ...], msgspec.Meta(max_length=MOST_MOVABLE)] = ()


class MoveRequest(_Message, frozen=True):
    """Let a request of this front go on at another instance; nothing if it has ended, or moves.

    :param epoch: of the manager; a front that has seen a higher one does nothing.
    :param num_blocks: 0: all of it goes; else so many of its sections lie there from now on.
    """

    epoch: int
    request_id: str
    target: str
    num_blocks: Count = 0


class FrontBeat(_Message, frozen=True):
    """A front lives, and what it knows.

    :param loads: what instances have still to do for it of the part that is theirs, as of
        :class:`kvell.cluster.steering.roles.RoleView`; those that do all parts are not named.
    :param roles: the role of each instance that it knows, as of ``role_changes``.
    :param used: what each key used at this front.
    :param epoch: the highest of a manager that it has seen.
    :param pressed: instances that are short of memory, and what it has there.
    :param coming: requests of it that are on their way to an instance; only where any is.
    """

    loads: dict[str, int] = {}
    roles: dict[str, str] = {}
    role_changes: int = 0
    used: KeyUsesByName = {}
    epoch: Count = 0
    pressed: dict[str, Pressed] = {}
    coming: dict[str, Count] = {}


class ScaleInstances(_Message, frozen=True):
    """Add or drain instances until each role named has so many.

    :param call: comes back in the answer.
    """

    call: int
    instances: dict[str, int]


class DrainInstance(_Message, frozen=True):
    """Take an instance out of service."""

    call: int
    instance_id: str


class Leave(_Message, frozen=True):
    """The front ends on purpose.  The manager hangs up once it has taken that in; when the cluster
    ends with the front, it first ends that.

    :param ends_cluster: whether the cluster should end if no other front is there now.
    """

    ends_cluster: bool = False


class Answer(_Message, frozen=True):
    """A call was carried out, or must be changed.

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
    """One message as a whole frame."""
    return framed(_ENCODER.encode(message))


def decode_to_manager(body: bytes) -> ToManager:
    """Decode what a front says.

    :raises ProtocolError: on anything that is not exactly one well-typed message.
    """
    message: ToManager = decode(_TO_MANAGER, body)
    return message


def decode_to_front(body: bytes) -> ToFront:
    """Decode what the manager says; errors as of :func:`decode_to_manager`."""
    message: ToFront = decode(_TO_FRONT, body)
    return message
