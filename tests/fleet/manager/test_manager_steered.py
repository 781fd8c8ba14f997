"""What a manager tells: one request leaves an instance short of memory; and rosters."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvell.fleet.manager.manager as manager_module
from kvell.cluster.instance_load import Movable
from kvell.cluster.steering.lending.planner import RESERVED_ROUNDS
from kvell.cluster.steering.steering import Move, Orders, Steering
from kvell.engine.protocol.messages import Heartbeat
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import InstanceReport, LoadStats
from kvell.fleet.manager.messages import FrontBeat, MoveRequest, Pressed, RosterEntry
from kvell.fleet.manager.steered import SETTLING_LOOKS, FleetSteering
from kvell.fleet.started.members import MemberCallbacks, OwnMember
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


def decided(
    one: FleetSteering, now_seconds: float, beats: dict[str, LoadStats], epoch: int = 7
) -> Orders:
    entries = [entry(name) for name in beats]
    reports = {name: InstanceReport(FACTS, beat) for name, beat in beats.items()}
    return one.decide(entries, reports, {}, FRONTS, now_seconds, epoch)


def test_four_fronts_at_one_instance_move_one_request_in_a_beat() -> None:
    """When each decided for itself, all four moved one to the same instance."""
    one = FleetSteering(Steering(None, SETTLING_LOOKS))
    for front in FRONTS:
        one.on_beat(front, beat(front, "mixed-0", 3))
    beats = {"mixed-0": heartbeat(100), "mixed-1": heartbeat(900)}
    orders = decided(one, 1.0, beats)
    assert orders == Orders(7, (), (Move("front-d:0", "mixed-0", "mixed-1"),))
    assert one.messages(orders) == [("front-d", MoveRequest(7, "front-d:0", "mixed-1"))]
    for look in range(SETTLING_LOOKS):
        assert not decided(one, 2.0 + look, beats).moves, "it is not told yet that it moves"
    one.on_beat("front-d", beat("front-d", "mixed-0", 2, leaving=1))
    assert not decided(one, 9.0, beats).moves, "it is still on its way"
    one.on_beat("front-d", beat("front-d", "mixed-0", 2))
    assert len(decided(one, 10.0, beats).moves) == 1


def test_requests_of_fronts_that_are_gone_are_nobodys() -> None:
    one = FleetSteering(Steering())
    one.on_beat("front-z", beat("front-z", "mixed-0", 3))
    assert not decided(one, 1.0, {"mixed-0": heartbeat(100), "mixed-1": heartbeat(900)}).moves


sizes = st.lists(st.integers(0, 1000), min_size=2, max_size=8)


@given(sizes, st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(0, 9))
def test_an_instance_is_in_one_move_of_a_look_at_most(
    free: Sequence[int], counts: Sequence[int], looks: int
) -> None:
    one = FleetSteering(Steering(None, SETTLING_LOOKS))
    names = [f"mixed-{number}" for number in range(len(free))]
    beats = dict(zip(names, map(heartbeat, free), strict=True))
    for front, count in zip(FRONTS, counts, strict=True):
        pressed = {
            name: Pressed(0, tuple(Movable(f"{front}:{name}:{n}", 30) for n in range(count)))
            for name in names
        }
        one.on_beat(front, FrontBeat(pressed=pressed))
    busy: list[set[str]] = []
    for look in range(looks):
        moves = decided(one, float(look), beats).moves
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
    async with managed(instance_command(), {"mixed": 2}) as one:
        fronts = [await joined(one.manager, name) for name in FRONTS]
        await fronts[0].serving(2)
        members = members_of(one.manager)
        await until(lambda: all(each.report and each.report.load for each in members))
        pressed = members["mixed-0"]
        hear = pressed.instance_said

        def hears(event: object) -> None:
            hear(Heartbeat(heartbeat(100)) if isinstance(event, Heartbeat) else event)  # type: ignore[arg-type]

        pressed.supervisor._listener.instance_said = hears  # type: ignore[method-assign]
        await until(lambda: pressed.report is not None and pressed.report.load == heartbeat(100))
        for front in fronts:
            front.say(beat(front.name, "mixed-0", 3))
        await until(lambda: any(front.moves for front in fronts))
        [order] = [order for front in fronts for order in front.moves]
        assert order.target == "mixed-1" and order.epoch == fronts[0].roster.epoch
        looked = one.manager._steering._look
        await until(lambda: one.manager._steering._look > looked)
        assert sum(len(front.moves) for front in fronts) == 1
        for front in fronts:
            await front.__aexit__()


def test_sections_of_the_longest_request_go_so_that_one_that_waits_has_room() -> None:
    """Its front is told, by its name in the request's."""
    one = FleetSteering(Steering(None, SETTLING_LOOKS))
    for front in FRONTS:
        one.on_beat(front, FrontBeat())

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

    orders = decided(one, 1.0, beats())
    assert orders.moves == (Move("front-b:0", "mixed-0", "mixed-1", 2),)
    assert one.messages(orders) == [("front-b", MoveRequest(7, "front-b:0", "mixed-1", 2))]
    for look in range(RESERVED_ROUNDS + SETTLING_LOOKS):
        assert not decided(one, 2.0 + look, beats()).moves, "it is on its way"
    said = beats()
    assert decided(one, 8.0, said).moves, "it was refused, and is planned anew"
    assert not decided(one, 99.0, said).moves, "nobody has said anything since"


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
    one = FleetSteering(Steering())
    one.on_beat("front-a", FrontBeat(pressed={"decode-0": Pressed(2)}, coming={"mixed-0": 3}))
    members = one.members(roster, reports, loads)
    assert [(member.instance_id, member.role, member.work) for member in members] == [
        ("decode-0", "decode", 0),
        ("mixed-0", "mixed", 8),
        ("prefill-0", "prefill", 7),
        ("decode-1", "prefill", 9),
    ]
    assert [member.num_leaving for member in members] == [2, 0, 0, 0]
    assert [member.num_coming for member in members] == [0, 3, 0, 0]
    assert not any(member.can_take or member.is_short for member in members), "none has beaten yet"
