"""What a manager tells: one request leaves an instance short of memory; and rosters."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvell.fleet.manager.manager as manager_module
from kvell.cluster.instance_load import Movable
from kvell.cluster.steering.lending.algorithm import Move
from kvell.cluster.steering.lending.planner import RESERVED_ROUNDS
from kvell.cluster.steering.steering import Orders, Steering
from kvell.engine.protocol.messages import Heartbeat
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import InstanceReport, LoadStats
from kvell.fleet.fleet import MemberCallbacks
from kvell.fleet.manager.manager import entries
from kvell.fleet.manager.messages import (
    Answer,
    DrainInstance,
    Ended,
    FrontBeat,
    Leave,
    MoveRequest,
    Pressed,
    Roster,
    RosterEntry,
    ScaleInstances,
    ToFront,
    ToManager,
    decode_to_front,
    decode_to_manager,
    encode_message,
)
from kvell.fleet.manager.steered import SETTLING_LOOKS, FrontTable
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.host import Host
from kvell.fleet.started.members import Members, OwnMember
from kvell.fleet.started.supervisor import Supervisor
from kvell.vocabulary import RequestId
from kvell.wire.frames import HEADER_BYTES, ProtocolError
from tests.fleet.manager.front_client import joined, managed
from tests.fleet.seen import members_of
from tests.front.scenarios import until
from tests.reports import facts, load

CommandFactory = Callable[..., list[str]]
FACTS = facts(max_model_len=9000, pool_bytes=1000, token_bytes=1, section_bytes=100)
FRONTS = tuple(f"front-{name}" for name in "abcd")


def entry(name: str) -> RosterEntry:
    return RosterEntry(name, name.rpartition("-")[0], "serving")


def heartbeat(free_bytes: int, waiting: int = 0) -> LoadStats:
    return load(free_bytes, 1000, waiting)


def beat(front: str, pressed: str, count: int, leaving: int = 0) -> FrontBeat:
    requests = tuple(Movable(f"{front}:{number}", 20 + number) for number in range(count))
    return FrontBeat(pressed={pressed: Pressed(leaving, requests)})


class Steered(FrontTable):
    """Fronts whose leases never end, and their manager's steering."""

    def __init__(self, steering: Steering | None = None) -> None:
        super().__init__(lease_seconds=1e9, lonely_seconds=1e9, now_seconds=0.0)
        self.steering = steering or Steering(None, SETTLING_LOOKS)

    def hear(self, front: str, beat: FrontBeat) -> None:
        self.on_beat(front, beat, 0.0)

    def decide(self, now_seconds: float, beats: dict[str, LoadStats], epoch: int = 7) -> Orders:
        entries = [entry(name) for name in beats]
        reports = {name: InstanceReport(FACTS, beat) for name, beat in beats.items()}
        members = self.members(entries, reports, now_seconds)
        return self.steering.decide(members, self.movable, now_seconds, epoch)


def test_four_fronts_at_one_instance_move_one_request_in_a_beat() -> None:
    """When each decided for itself, all four moved one to the same instance."""
    one = Steered()
    for front in FRONTS:
        one.hear(front, beat(front, "mixed-0", 3))
    beats = {"mixed-0": heartbeat(100), "mixed-1": heartbeat(900)}
    orders = one.decide(1.0, beats)
    assert orders == Orders(7, (), (Move("front-d:0", "mixed-0", "mixed-1"),))
    assert one.messages(orders) == [("front-d", MoveRequest(7, "front-d:0", "mixed-1"))]
    for look in range(SETTLING_LOOKS):
        assert not one.decide(2.0 + look, beats).moves, "it is not told yet that it moves"
    one.hear("front-d", beat("front-d", "mixed-0", 2, leaving=1))
    assert not one.decide(9.0, beats).moves, "it is still on its way"
    one.hear("front-d", beat("front-d", "mixed-0", 2))
    assert len(one.decide(10.0, beats).moves) == 1


def test_requests_of_fronts_that_are_gone_are_nobodys() -> None:
    one = Steered(Steering())
    one.hear("front-z", beat("front-z", "mixed-0", 3))
    one.on_left("front-z", 0.5)
    assert not one.decide(1.0, {"mixed-0": heartbeat(100), "mixed-1": heartbeat(900)}).moves


sizes = st.lists(st.integers(0, 1000), min_size=2, max_size=8)


@given(sizes, st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(0, 9))
def test_an_instance_is_in_one_move_of_a_look_at_most(
    free: Sequence[int], counts: Sequence[int], looks: int
) -> None:
    one = Steered()
    names = [f"mixed-{number}" for number in range(len(free))]
    beats = dict(zip(names, map(heartbeat, free), strict=True))
    for front, count in zip(FRONTS, counts, strict=True):
        pressed = {
            name: Pressed(0, tuple(Movable(f"{front}:{name}:{n}", 30) for n in range(count)))
            for name in names
        }
        one.hear(front, FrontBeat(pressed=pressed))
    busy: list[set[str]] = []
    for look in range(looks):
        moves = one.decide(float(look), beats).moves
        involved = [name for move in moves for name in (move.source, move.target)]
        assert len(involved) == len(set(involved))
        for before in busy[-SETTLING_LOOKS:]:
            assert not before & set(involved)
        busy.append(set(involved))
        for move in moves:
            assert beats[move.target].free_bytes > beats[move.source].free_bytes


async def test_of_four_fronts_one_is_told_to_move_a_request(
    instance_command: CommandFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With instances as processes, one of which says that it has no memory left."""
    monkeypatch.setattr(manager_module, "ROSTER_SECONDS", 0.05)
    decided, decide = list[object](), Steering.decide

    def noted(*views: Any, **more: Any) -> Any:
        decided.append(decide(*views, **more))
        return decided[-1]

    monkeypatch.setattr(Steering, "decide", noted)
    async with managed(instance_command(), {"mixed": 2}) as one:
        fronts = [await joined(one.manager, name) for name in FRONTS]
        await fronts[0].serving(2)
        members = members_of(one.manager)
        await until(lambda: all(each.report and each.report.load for each in members))
        pressed = members["mixed-0"]
        hear = pressed.instance_said

        def hears(event: object) -> None:
            hear(Heartbeat(heartbeat(100)) if isinstance(event, Heartbeat) else event)  # type: ignore[arg-type]

        pressed.instance_said = hears  # type: ignore[method-assign]
        await until(lambda: pressed.report is not None and pressed.report.load == heartbeat(100))
        for front in fronts:
            front.say(beat(front.name, "mixed-0", 3))
        await until(lambda: any(front.moves for front in fronts))
        [order] = [order for front in fronts for order in front.moves]
        assert order.target == "mixed-1" and order.epoch == fronts[0].roster.epoch
        looked = len(decided)
        await until(lambda: len(decided) > looked)
        assert sum(len(front.moves) for front in fronts) == 1
        for front in fronts:
            await front.__aexit__()


def test_sections_of_the_longest_request_go_so_that_one_that_waits_has_room() -> None:
    """Its front is told, by its name in the request's."""
    one = Steered()
    for front in FRONTS:
        one.hear(front, FrontBeat())

    def beats() -> dict[str, LoadStats]:
        long = RequestPlacementEntry(RequestId("front-b:0"), "mixed-0", 8, local=True)
        short = load(
            *(100, 1000, 1),
            running=1,
            held_tokens=5,
            waiting_tokens=150,
            head_tokens=150,
            head_bytes=150,
            longest=(long,),
        )
        return {"mixed-0": short, "mixed-1": heartbeat(900)}

    orders = one.decide(1.0, beats())
    assert orders.moves == (Move("front-b:0", "mixed-0", "mixed-1", 2),)
    assert one.messages(orders) == [("front-b", MoveRequest(7, "front-b:0", "mixed-1", 2))]
    for look in range(RESERVED_ROUNDS + SETTLING_LOOKS):
        assert not one.decide(2.0 + look, beats()).moves, "it is on its way"
    said = beats()
    assert one.decide(8.0, said).moves, "it was refused, and is planned anew"
    assert not one.decide(99.0, said).moves, "nobody has said anything since"


def test_only_those_that_serve_are_steered_in_their_present_role() -> None:
    """With the work of all fronts together."""
    roster = [
        RosterEntry("decode-0", "decode", "serving"),
        RosterEntry("mixed-0", "mixed", "serving"),
        RosterEntry("prefill-0", "prefill", "serving"),
        RosterEntry("prefill-1", "prefill", "restarting"),
        RosterEntry("prefill-2", "prefill", "draining"),
        RosterEntry("decode-1", "prefill", "serving"),
    ]
    reports = {entry.instance_id: InstanceReport(FACTS) for entry in roster}
    loads = {"prefill-0": 7, "mixed-0": 8, "decode-1": 9}
    one = Steered(Steering())
    one.hear("front-a", FrontBeat(loads, pressed={"decode-0": Pressed(2)}, coming={"mixed-0": 3}))
    members = one.members(roster, reports, 0.0)
    assert [(member.instance_id, member.role, member.work) for member in members] == [
        ("decode-0", "decode", 0),
        ("mixed-0", "mixed", 8),
        ("prefill-0", "prefill", 7),
        ("decode-1", "prefill", 9),
    ]
    assert [member.num_leaving for member in members] == [2, 0, 0, 0]
    assert [member.num_coming for member in members] == [0, 3, 0, 0]
    assert not any(member.can_take or member.is_short for member in members), "none has beaten yet"


ENDED = Ended(4, "the instance process ended unexpectedly (exit -9)", "killed")


class FakeSupervisor:
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
