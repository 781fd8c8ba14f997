"""Messages and pulls between instances that live, die and cannot reach each other."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvell.mempool.entries import (
    NOT_IN_PLACE,
    Heard,
    PeerEntry,
    PeerLost,
    PeerMapped,
    PullEnded,
)
from kvell.mempool.transfers.actions import Pull
from kvell.mempool.transfers.messages import Abandon, Transfer, Written
from kvell.simulator.clock.links import Link
from kvell.simulator.clock.transport import VirtualTransport
from kvell.simulator.cluster.instance import REVOKED, STOPPED, UNREACHED, Links, Network
from kvell.simulator.cluster.loop import Loop

LINKS = Links(
    Link(0.5, 100.0), Link(1.0), hang_up_seconds=2.0, unreached_seconds=10.0, stop_seconds=0.25
)
PAGE_BYTES = [100, 300]


class Pages:
    def __init__(self) -> None:
        self.content: dict[tuple[int, int], str] = {}

    def read(self, source: "Pages", rows: Any) -> None:
        for group, page, own in rows.tolist():
            self.content[group, own] = source.content.get((group, page), "")


@dataclass
class Ear:
    """An endpoint that keeps what it hears, and when."""

    name: str
    incarnation: int
    loop: Loop
    device: Any = field(default_factory=Pages)
    rights: set[int] = field(default_factory=set)
    heard: list[tuple[float, PeerEntry]] = field(default_factory=list)

    def on_peer_entry(self, entry: PeerEntry) -> None:
        self.heard.append((round(self.loop.now_seconds, 6), entry))

    def connect_peer(self, other: "Ear", *, is_near: bool) -> None:
        self.on_peer_entry(
            PeerMapped(other.name, other.incarnation, 64 if is_near else NOT_IN_PLACE)
        )

    def answer(self, seconds: float) -> float | None:
        return seconds


class Place:
    def __init__(self, hosts: dict[str, str] | None = None) -> None:
        self.loop = Loop()
        self.transport = VirtualTransport(LINKS.messages)
        self.network = Network(self.loop, self.transport, LINKS, PAGE_BYTES, hosts)
        self.a, self.b, self.c = (self.enter(name, i + 1) for i, name in enumerate("abc"))

    def enter(self, name: str, incarnation: int) -> Any:
        ear: Any = Ear(name, incarnation, self.loop)
        self.network.enter(ear)
        return ear

    def settle(self) -> None:
        while (at := self.loop.next_seconds(self.transport)) is not None:
            if not self.loop.advance(at):
                self.network.deliver()


TRANSFER = Transfer("a", 1, 7)
SAID = Abandon(TRANSFER, "because")


def pull(rows: list[list[int]], transfer: Transfer = TRANSFER) -> Pull:
    return Pull(transfer, np.asarray(rows, np.int32).reshape(-1, 3))


def test_a_message_arrives_as_it_was_sent() -> None:
    place = Place()
    place.network.send(place.a, "b", SAID)
    place.settle()
    assert place.b.heard == [(1.0, Heard("a", SAID))]
    assert not place.c.heard


def test_who_writes_to_nobody_hears_so() -> None:
    place = Place()
    place.network.send(place.a, "nobody", SAID)
    place.settle()
    assert place.a.heard == [(2.0, PeerLost("nobody", 0))]


def test_instances_meet_before_a_message_and_again_when_they_were_apart() -> None:
    place = Place({"c": "another"})
    place.network.send(place.a, "b", SAID)
    place.network.send(place.a, "c", SAID)
    place.network.send(place.a, "b", SAID)
    place.settle()
    assert place.a.heard == [(0.0, PeerMapped("b", 2, 64)), (0.0, PeerMapped("c", 3, NOT_IN_PLACE))]
    assert place.b.heard == [(1.0, PeerMapped("a", 1, 64)), *[(1.0, Heard("a", SAID))] * 2]
    assert place.c.heard[0] == (1.0, PeerMapped("a", 1, NOT_IN_PLACE))
    place.network.partition(["a"], ["b"])
    place.settle()
    place.network.heal()
    place.network.send(place.b, "a", SAID)
    place.settle()
    assert [entry for _, entry in place.a.heard[2:]] == [
        PeerLost("b", 2),
        PeerMapped("b", 2, 64),
        Heard("b", SAID),
    ]
    place.network.leave(place.b)
    new = place.enter("b", 9)
    place.settle()
    place.network.send(place.a, "b", SAID)
    assert [entry for _, entry in place.a.heard[5:]] == [PeerLost("b", 2), PeerMapped("b", 9, 64)]
    assert not new.heard


FOUR = [[1, page, page + 10] for page in range(4)]


def staged(transfer: Transfer = TRANSFER, stages: int = 4) -> Pull:
    return Pull(transfer, np.asarray(FOUR, np.int32), stages)


def test_stages_cross_as_they_are_written_and_the_rest_ends_the_pull() -> None:
    place = Place()
    place.a.rights.add(7)
    place.network.pull(place.b, staged())
    for stage in (0, 1, 3):
        hint = Written(TRANSFER, stage)
        place.loop.at(10.0 * stage, partial(place.network.send, place.a, "b", hint))
    at: list[float] = []
    place.b.device.read = lambda source, rows: at.extend(
        [round(place.loop.now_seconds, 3)] * len(rows)
    )
    place.loop.at(60.0, lambda: place.network.rest(place.b, TRANSFER))
    place.settle()
    # A message takes a second, a page half a second and three more.
    assert at == [4.5, 14.5, 37.5, 37.5]
    assert place.b.heard == [(60.5, PullEnded(TRANSFER, ""))]
    assert place.network.pulled_bytes == {"b": 1200}


def test_hints_before_a_pull_twice_or_behind_the_rest_bring_each_page_once() -> None:
    place = Place()
    place.a.rights.add(7)
    place.a.device.content = {(1, page): f"page {page}" for page in range(4)}
    for stage in (1, 0, 1):
        place.network.send(place.a, "b", Written(TRANSFER, stage))
    place.settle()
    assert not place.b.heard, "whoever steps need not hear of it"
    place.network.pull(place.b, staged())
    assert place.network.pulled_bytes == {"b": 600}
    place.network.send(place.a, "b", Written(TRANSFER, 2))
    place.network.rest(place.b, TRANSFER)
    place.network.rest(place.b, TRANSFER)
    place.settle()
    ((_, ended),) = place.b.heard
    assert ended == PullEnded(TRANSFER, "")
    assert place.b.device.content == {(1, page + 10): f"page {page}" for page in range(4)}
    assert place.network.pulled_bytes == {"b": 1200}


def test_a_hint_of_somebody_elses_transfer_is_none() -> None:
    place = Place()
    place.network.pull(place.b, staged())
    place.network.send(place.c, "b", Written(TRANSFER, 3))
    place.settle()
    assert place.network.pulled_bytes == {} and not place.b.heard


def test_a_staged_pull_is_stopped_or_loses_its_source_between_two_stages() -> None:
    other = Transfer("a", 1, 8)
    for is_stopped in (True, False):
        place = Place()
        stop, leave = place.network.stop, place.network.leave
        end = partial(stop, place.b, TRANSFER) if is_stopped else partial(leave, place.a)
        place.network.pull(place.b, staged())
        place.network.pull(place.c, staged(other))
        place.network.send(place.a, "b", Written(TRANSFER, 0))
        place.loop.at(9.0, end)
        place.loop.at(20.0, partial(place.network.rest, place.b, TRANSFER))
        place.settle()
        ends = [entry for _, entry in place.b.heard if isinstance(entry, PullEnded)]
        assert [one.problem for one in ends] == [STOPPED if is_stopped else UNREACHED]
        assert len(place.b.device.content) == 1


def test_a_reader_that_dies_in_a_staged_pull_gets_nothing_more() -> None:
    place = Place()
    place.network.pull(place.b, staged())
    place.network.send(place.a, "b", Written(TRANSFER, 1))
    place.loop.at(1.5, lambda: place.network.leave(place.b))
    place.settle()
    assert place.b.device.content == {} and place.b.heard == []


def test_a_new_incarnation_gets_no_letter_of_the_old_one() -> None:
    place = Place()
    place.network.send(place.a, "b", SAID)
    place.network.leave(place.b)
    new = place.enter("b", 9)
    place.network.send(place.a, "b", SAID)
    place.settle()
    assert new.heard == [(1.0, Heard("a", SAID))]
    assert not place.b.heard


def test_a_death_is_seen_by_all_others_and_ends_what_it_said() -> None:
    place = Place()
    place.network.send(place.a, "b", SAID)
    place.network.leave(place.a)
    place.settle()
    lost = (2.0, PeerLost("a", 1))
    assert (place.b.heard, place.c.heard) == ([lost], [lost])


def test_a_pull_takes_its_bytes_and_reads_at_both_ends() -> None:
    place = Place()
    place.a.rights.add(7)
    place.a.device.content = {(0, 3): "old", (1, 4): "old"}
    place.network.pull(place.b, pull([[0, 3, 5], [1, 4, 6]]))
    place.loop.after(1.0, lambda: place.a.device.content.update({(1, 4): "new"}))
    place.settle()
    assert place.b.heard == [(4.5, PullEnded(TRANSFER, ""))]
    assert place.b.device.content == {(0, 5): "old", (1, 6): "new"}
    assert place.network.pulled_bytes == {"b": 400}


def test_pulls_between_two_queue_and_others_do_not_wait_for_them() -> None:
    place = Place()
    place.a.rights |= {7, 8, 9}
    second, third = Transfer("a", 1, 8), Transfer("a", 1, 9)
    place.network.pull(place.b, pull([[1, 0, 0]]))
    place.network.pull(place.b, pull([[1, 1, 1]], second))
    place.network.pull(place.c, pull([[1, 1, 1]], third))
    place.network.send(place.a, "b", SAID)
    place.settle()
    ends = [at for at, entry in place.b.heard if isinstance(entry, PullEnded)]
    assert ends == [3.5, 6.5]
    assert place.b.heard[0] == (1.0, Heard("a", SAID)), "messages have a way of their own"
    assert place.c.heard == [(3.5, PullEnded(third, ""))]


def test_a_pull_of_nothing_ends_too() -> None:
    place = Place()
    place.a.rights.add(7)
    place.network.pull(place.b, pull([]))
    place.settle()
    assert place.b.heard == [(0.5, PullEnded(TRANSFER, ""))]


def test_a_right_that_is_gone_at_the_end_spoils_the_copy() -> None:
    place = Place()
    place.a.rights.add(7)
    place.network.pull(place.b, pull([[0, 3, 5]]))
    place.loop.after(1.4, place.a.rights.clear)
    place.settle()
    assert place.b.heard == [(1.5, PullEnded(TRANSFER, REVOKED))]


def test_a_stopped_pull_ends_once() -> None:
    place = Place()
    place.network.pull(place.b, pull([[0, 3, 5]]))
    place.network.stop(place.b, TRANSFER)
    place.network.stop(place.b, TRANSFER)
    place.settle()
    assert place.b.heard == [(0.25, PullEnded(TRANSFER, STOPPED))]


def test_a_pull_from_an_incarnation_that_is_gone_cannot_begin() -> None:
    place = Place()
    for transfer in (Transfer("a", 0, 7), Transfer("nobody", 1, 7)):
        place.network.pull(place.b, pull([[0, 3, 5]], transfer))
    place.settle()
    assert [entry for _, entry in place.b.heard] == [
        PullEnded(Transfer("a", 0, 7), UNREACHED),
        PullEnded(Transfer("nobody", 1, 7), UNREACHED),
    ]


def test_a_source_that_dies_ends_the_pull_and_a_dead_reader_hears_nothing() -> None:
    place = Place()
    place.a.rights |= {7, 8}
    place.network.pull(place.b, pull([[1, 3, 5]]))
    place.network.pull(place.c, pull([[1, 3, 5]], Transfer("a", 1, 8)))
    place.network.leave(place.c)
    place.network.leave(place.a)
    place.settle()
    assert (2.0, PullEnded(TRANSFER, UNREACHED)) in place.b.heard
    assert sum(isinstance(entry, PullEnded) for _, entry in place.b.heard) == 1
    assert place.c.heard == []


def test_a_partition_loses_messages_breaks_pulls_and_is_seen_by_both() -> None:
    place = Place()
    place.a.rights.add(7)
    place.network.send(place.a, "b", SAID)
    place.network.pull(place.b, pull([[1, 3, 5]]))
    place.network.partition(["a"], ["b"])
    place.network.send(place.c, "b", SAID)
    place.settle()
    assert [entry for _, entry in place.a.heard] == [PeerLost("b", 2)]
    assert [entry for _, entry in place.b.heard] == [
        Heard("c", SAID),
        PullEnded(TRANSFER, UNREACHED),
        PeerLost("a", 1),
    ]
    assert {at for at, _ in place.b.heard} == {1.0, 10.0}


def test_who_writes_into_a_partition_is_told_unless_it_is_healed() -> None:
    place = Place()
    place.network.partition(["a"], ["b", "c"])
    place.loop.after(20.0, lambda: place.network.send(place.a, "b", SAID))
    place.loop.after(25.0, lambda: place.network.send(place.a, "b", SAID))
    place.loop.after(32.0, place.network.heal)
    place.loop.after(33.0, lambda: place.network.send(place.a, "b", SAID))
    place.settle()
    told = [(at, entry) for at, entry in place.a.heard if at > 10]
    assert told == [(30.0, PeerLost("b", 0))]
    assert place.b.heard[-1] == (34.0, Heard("a", SAID))
    assert sum(isinstance(entry, Heard) for _, entry in place.b.heard) == 1


def test_a_partition_holds_for_incarnations_that_start_meanwhile() -> None:
    place = Place()
    place.network.partition(["a"], ["b"])
    place.network.leave(place.b)
    new = place.enter("b", 9)
    place.network.send(place.a, "b", SAID)
    place.network.pull(new, pull([[0, 3, 5]]))
    place.settle()
    assert [entry for _, entry in new.heard] == [PullEnded(TRANSFER, UNREACHED)]


def test_things_happen_in_order_of_time_and_then_of_asking() -> None:
    loop, seen = Loop(), list[str]()
    transport = VirtualTransport()
    loop.at(2.0, lambda: seen.append("late"))

    def first() -> None:
        seen.append("first")
        loop.at(0.0, lambda: seen.append("now"))

    loop.at(1.0, first)
    loop.at(1.0, lambda: seen.append("second"))
    while (at := loop.next_seconds(transport)) is not None:
        assert loop.advance(at)
    assert seen == ["first", "second", "now", "late"]
    assert loop.now_seconds == 2.0 and not loop.advance(9.0)
