"""What is decided of Ray's figures and records: room, threads, and what an earlier manager left."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("ray")

from kvell.fleet.placing.placement import NoRoomError, PlacingError
from kvell.fleet.placing.ray import reservations
from kvell.fleet.placing.ray.names import LauncherName, drawn_group, group_beginning
from kvell.fleet.placing.ray.record import (
    Bundle,
    Group,
    Remains,
    decode_record,
    sorted_out,
)
from kvell.fleet.placing.ray.reservations import (
    REPORT_SECONDS,
    ROOM_SECONDS,
    Reservations,
    starts_machines,
)
from kvell.fleet.placing.ray.room import (
    SHARED,
    Machine,
    no_room,
    reserved_by_instance,
    sharing,
    shortage,
    threads,
)

ONE = Machine("a", "10.0.0.1", True, 4.0, 1.0)
TWO = Machine("b", "10.0.0.2", True, 8.0, 2.5)
DEAD = Machine("c", "10.0.0.3", False, 8.0, 8.0)
LOCAL = Machine("d", "127.0.0.2", True, 2.0, 2.0, is_shared=True)
RECORD = {"prefill-0": Bundle("g", 0), "decode-0": Bundle("g", 1), "decode-1": Bundle("h", 0)}


def launcher(instance_id: str, group: str, index: int) -> LauncherName:
    return LauncherName("blue", instance_id, group, index)


def test_whole_processors_of_living_machines_are_room() -> None:
    assert shortage([ONE, TWO, DEAD], 3) == ""
    assert shortage([ONE, TWO, DEAD], 4) == (
        "4 CPUs wanted, one for each instance, and 3 free in Ray "
        "(10.0.0.1 has 1 of 4 free, 10.0.0.2 has 2 of 8 free)"
    )


def test_what_is_missing_is_an_error_with_a_remedy() -> None:
    error = no_room([ONE, DEAD], ["prefill-0", "decode-0", "decode-1"])
    assert (error.field, error.value) == ("--instances", "prefill=1,decode=2")
    assert "3 CPUs wanted" in error.problem
    assert error.remedy.startswith("use at most 1 here, ")
    assert no_room([], ["mixed-4"]).remedy.startswith("end others, ")


def test_a_shared_machine_has_room_for_any() -> None:
    assert shortage([LOCAL], 50) == ""
    assert reserved_by_instance([LOCAL]) == {SHARED: 1.0}
    assert reserved_by_instance([ONE, TWO]) == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("offered", "usable", "instances", "expected"),
    [(8.0, 8, 2, 4), (8.0, 8, 3, 2), (4.0, 8, 2, 2), (64.0, 2, 1, 2), (2.0, 2, 5, 1)],
)
def test_threads_are_shared(offered: float, usable: int, instances: int, expected: int) -> None:
    assert threads(offered, usable, instances) == expected


def test_instances_are_spread_over_machines_that_live() -> None:
    assert [sharing([ONE, TWO, DEAD], count) for count in (1, 2, 3, 5)] == [1, 1, 2, 3]
    assert sharing([LOCAL], 3) == 3


def test_a_launchers_name_is_read_back() -> None:
    name = launcher("decode-1", drawn_group("blue"), 2)
    assert LauncherName.of(str(name)) == name
    assert LauncherName.of("blue/manager") is None


def test_groups_of_one_cluster_are_not_those_of_another() -> None:
    assert drawn_group("blue-2").startswith(group_beginning("blue-2"))
    assert not drawn_group("blue-2").startswith(group_beginning("blue"))


def test_a_record_is_read_back() -> None:
    assert decode_record(msgspec.msgpack.encode(RECORD)) == RECORD
    assert decode_record(None) == {}


def test_a_new_cluster_has_nothing() -> None:
    assert sorted_out({}, [], []) == Remains()


def test_instances_keep_their_bundles() -> None:
    groups = [Group("g", 3, True), Group("h", 1, True)]
    launchers = [launcher("prefill-0", "g", 0), launcher("decode-1", "h", 0)]
    remains = sorted_out(RECORD, groups, launchers)
    assert remains.kept == RECORD  # also decode-0, whose launcher was not made yet
    assert remains.free == [Bundle("g", 2)]
    assert (remains.stray_groups, remains.stray_launchers, remains.unreserved) == ([], [], {})


@pytest.mark.parametrize("is_placed", [True, False])
def test_what_nobody_was_started_in_is_given_back(is_placed: bool) -> None:
    remains = sorted_out(RECORD, [Group("g", 2, is_placed), Group("h", 1, is_placed)], [])
    assert remains == Remains(stray_groups=["g", "h"])


def test_who_had_no_room_yet_is_reserved_for_anew() -> None:
    """A group that waits is removed: the next manager asks with its own patience."""
    groups = [Group("g", 2, True), Group("h", 1, False)]
    remains = sorted_out(RECORD, groups, [launcher("prefill-0", "g", 0)])
    assert (list(remains.unreserved), remains.stray_groups) == (["decode-1"], ["h"])
    assert sorted(remains.kept) == ["decode-0", "prefill-0"]


def test_a_group_that_was_written_down_and_not_made_is_no_group() -> None:
    remains = sorted_out(RECORD, [Group("g", 2, True)], [launcher("prefill-0", "g", 0)])
    assert (list(remains.unreserved), remains.stray_groups) == (["decode-1"], [])


def test_what_an_instance_that_left_still_had_goes() -> None:
    groups = [Group("g", 2, True), Group("h", 1, True), Group("old", 1, True)]
    launchers = [
        *(launcher("prefill-0", "g", 0), launcher("decode-0", "g", 1)),
        *(launcher("decode-9", "old", 0), launcher("decode-1", "old", 0)),
    ]
    remains = sorted_out(RECORD, groups, launchers)
    assert remains.stray_groups == ["old"]
    assert remains.stray_launchers == launchers[2:]


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"active_nodes": {"node_" + 56 * "a": 1}, "pending_launches": {}}, False),
        ({"active_nodes": None, "pending_launches": {"worker": 2}}, True),
        ({"active_nodes": {"head-group": 1}}, True),
        ({}, False),
    ],
)
def test_an_autoscaler_has_types_of_machines(report: dict[str, object], expected: bool) -> None:
    status = json.dumps({"time": 1.5, "autoscaler_report": report}).encode()
    assert starts_machines(status, b"0") == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *((one, None) for one in (None, b"", b"{}", b'{"time": 1.5, "autoscaler_report": null}')),
        *((one, False) for one in (b"[1]", b'{"autoscaler_report": 3}')),
    ],
)
def test_without_a_report_the_second_version_says_that_it_runs(
    status: bytes | None, expected: bool | None
) -> None:
    """Before the first report it is not known: a machine may come that has room."""
    assert starts_machines(status, None) is expected
    assert starts_machines(status, b"0") is expected
    assert starts_machines(status, b"1")


class Waiting:
    """A group that Ray places after some looks, in virtual time; and what is said meanwhile.

    :param is_scaled: what is known of an autoscaler at each look; the last for all further ones.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_scaled: list[bool | None]) -> None:
        self.now, self.looks, self.is_scaled = 0.0, 0, is_scaled
        self.said: list[str] = []
        self.placed_after = 1000
        for name, fake in {
            "get_placement_group": lambda _name: self,
            "machines": lambda: [ONE],
            "has_autoscaler": lambda: is_scaled[min(self.looks - 1, len(is_scaled) - 1)],
            "time": SimpleNamespace(monotonic=lambda: self.now),
        }.items():
            monkeypatch.setattr(reservations, name, fake)

    def wait(self, seconds: float) -> bool:
        """Ray's name for a look."""
        self.now += seconds
        self.looks += 1
        return self.looks > self.placed_after

    def go(self, within_seconds: float = 600.0) -> None:
        waits = Reservations("here", self.said.append).wait_for_room
        asyncio.run(waits("group", ["prefill-0", "decode-0"], within_seconds))


def test_missing_room_is_an_error_soon_where_ray_starts_no_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(monkeypatch, [False])
    with pytest.raises(NoRoomError, match="2 CPUs wanted"):
        waiting.go()
    assert waiting.now <= 2 * ROOM_SECONDS and set(waiting.said) == {""}


def test_machines_of_an_autoscaler_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that has just started does not say yet that it has one."""
    waiting = Waiting(monkeypatch, [*[None] * 15, True])
    waiting.placed_after = 100
    waiting.go()
    [line] = set(waiting.said) - {""}
    assert line.startswith("machines of Ray's autoscaler (2 CPUs wanted")
    assert waiting.now > REPORT_SECONDS and waiting.said[-1] == ""


def test_a_ray_that_never_reports_is_taken_for_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, [None])
    with pytest.raises(NoRoomError):
        waiting.go()
    assert REPORT_SECONDS <= waiting.now <= REPORT_SECONDS + 2 * ROOM_SECONDS


def test_an_autoscaler_that_starts_nothing_in_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(monkeypatch, [True])
    with pytest.raises(PlacingError, match="placed no instance within 60 s"):
        waiting.go(60.0)
