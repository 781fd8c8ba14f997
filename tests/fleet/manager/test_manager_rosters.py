"""Rosters out of what the manager knows, and the messages as bytes."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.fleet.fleet import MemberCallbacks
from kvell.fleet.instance.supervisor import Supervisor
from kvell.fleet.manager.manager import entries
from kvell.fleet.manager.messages import (
    Answer,
    DrainInstance,
    Ended,
    FrontBeat,
    Leave,
    Roster,
    RosterEntry,
    ScaleInstances,
    ToFront,
    ToManager,
    decode_to_front,
    decode_to_manager,
    encode_message,
)
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.host import Host
from kvell.fleet.started.members import Members, OwnMember
from kvell.wire.frames import HEADER_BYTES, ProtocolError

ENDED = Ended(4, "the instance process ended unexpectedly (exit -9)", "killed")


class FakeSupervisor:
    """What a supervisor says of its instance."""

    def __init__(self, state: str, pid: int | None = None) -> None:
        self.state, self.pid, self.restarts = state, pid, 2
        is_up = pid is not None
        self.host, self.address = ("10.0.0.1", "tcp://10.0.0.1:5000") if is_up else ("", "")


def member(instance_id: str, state: str, pid: int | None = None) -> OwnMember:
    def deaf(*_words: object) -> None: ...

    fleet = Members((), FrontLimits(), Host(), MemberCallbacks(*[deaf] * 6))
    one = OwnMember(instance_id, instance_id[:-2], fleet)
    one.supervisor = cast(Supervisor, FakeSupervisor(state, pid))
    one.incarnation = 9
    return one


def test_a_roster_says_what_is_known_of_each_instance() -> None:
    members = [
        member("prefill-0", "serving", 100),
        member("decode-1", "restarting"),
        member("decode-0", "serving", 101),
    ]
    told = entries(members, ["decode-0"], {"prefill-0": "decode"}, {"decode-1": ENDED})
    where = "tcp://10.0.0.1:5000", "10.0.0.1"
    assert told == (
        RosterEntry("prefill-0", "decode", "serving", 9, *where, 100, 2),
        RosterEntry("decode-1", "decode", "restarting", 9, "", "", 0, 2, ENDED),
        RosterEntry("decode-0", "decode", "draining", 9, *where, 101, 2),
    )


@pytest.mark.parametrize("state", ["starting", "restarting", "draining", "failed", "gone"])
def test_one_that_leaves_and_does_not_serve_has_its_state(state: str) -> None:
    (told,) = entries([member("mixed-0", state)], ["mixed-0"], {}, {})
    assert told.state == state


TO_MANAGER: list[ToManager] = [
    FrontBeat({"prefill-0": 3}, {"prefill-0": "decode"}, 2),
    FrontBeat(),
    ScaleInstances(1, {"mixed": 3}),
    DrainInstance(2, "mixed-0"),
    Leave(),
]
TO_FRONT: list[ToFront] = [
    Roster(5, (RosterEntry("mixed-0", "mixed", "serving", 9, ended=ENDED),), 1, True, "why", 2),
    Roster(5, ()),
    Answer(1, "instances", "mixed=0", "must be more", "write 1"),
    Answer(2),
]


def body(message: ToManager | ToFront) -> bytes:
    return encode_message(message)[HEADER_BYTES:]


def test_each_side_reads_what_the_other_says_and_not_its_own_words() -> None:
    for to_manager in TO_MANAGER:
        assert decode_to_manager(body(to_manager)) == to_manager
        with pytest.raises(ProtocolError, match="malformed"):
            decode_to_front(body(to_manager))
    for to_front in TO_FRONT:
        assert decode_to_front(body(to_front)) == to_front
        with pytest.raises(ProtocolError, match="malformed"):
            decode_to_manager(body(to_front))


@given(
    st.sampled_from([body(one) for one in (*TO_MANAGER, *TO_FRONT)]),
    st.data(),
)
def test_a_changed_body_is_another_message_or_none(right: bytes, data: Any) -> None:
    """Nothing but a protocol error comes of it, and half a message is none."""
    at = data.draw(st.integers(0, len(right) - 1))
    changed = right[:at] + bytes([right[at] ^ data.draw(st.integers(1, 255))]) + right[at + 1 :]
    for decode in (decode_to_manager, decode_to_front):
        with pytest.raises(ProtocolError, match="malformed"):
            decode(right[:at])
        try:
            found = decode(changed)
        except ProtocolError:
            continue
        assert isinstance(found, ToManager | ToFront)
