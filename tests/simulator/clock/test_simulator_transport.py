"""The network in virtual time: what arrives, when and how often, and what is lost."""

import doctest
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvell.simulator.clock import transport
from kvell.simulator.clock.links import Delivery, Link, LinkStats
from kvell.simulator.clock.transport import VirtualTransport
from tests.depth import machine

LATE = 1e9


def sent(
    network: VirtualTransport, count: int, now_seconds: float = 0.0, to: str = "b"
) -> list[Delivery]:
    """Send numbered messages of 4 bytes from a; return all that arrive."""
    for number in range(count):
        network.send("a", to, number.to_bytes(4), now_seconds)
    return network.due(LATE)


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    return [int.from_bytes(each.payload) for each in deliveries]


class TestTime:
    def test_a_perfect_link_delivers_at_once(self) -> None:
        network = VirtualTransport()
        network.send("a", "b", b"x", 3.0)
        assert network.next_seconds() == 3.0
        assert network.due(3.0) == [Delivery("a", "b", b"x", 0, 3.0, 3.0, 1)]
        assert network.next_seconds() is None
        assert network.due(4.0) == []

    def test_latency_and_bandwidth_add_up(self) -> None:
        network = VirtualTransport(Link(latency_seconds=0.25, bandwidth_bytes=100.0))
        network.send("a", "b", bytes(50), 1.0)
        assert network.due(1.74) == []
        assert [each.due_seconds for each in network.due(1.75)] == [1.75]

    def test_messages_queue_behind_each_other_and_the_queue_drains(self) -> None:
        network = VirtualTransport(Link(latency_seconds=1.0, bandwidth_bytes=10.0))
        for now_seconds in (0.0, 0.0, 0.5, 9.0):
            network.send("a", "b", bytes(10), now_seconds)
        assert [each.due_seconds for each in network.due(LATE)] == [2.0, 3.0, 4.0, 11.0]

    def test_each_direction_has_its_own_queue(self) -> None:
        network = VirtualTransport(Link(bandwidth_bytes=1.0))
        network.send("a", "b", bytes(10), 0.0)
        network.send("b", "a", bytes(2), 0.0)
        network.send("a", "c", bytes(3), 0.0)
        assert [each.due_seconds for each in network.due(LATE)] == [2.0, 3.0, 10.0]

    def test_a_lost_message_took_its_time_on_the_wire(self) -> None:
        network = VirtualTransport(Link(bandwidth_bytes=1.0, loss=1.0))
        network.send("a", "b", bytes(10), 0.0)
        network.set_link("a", "b", Link(bandwidth_bytes=1.0))
        network.send("a", "b", bytes(1), 0.0)
        assert [each.due_seconds for each in network.due(LATE)] == [11.0]

    @pytest.mark.parametrize("again", [1.9, -math.inf, math.nan, math.inf])
    def test_time_never_runs_backwards_nor_ends(self, again: float) -> None:
        network = VirtualTransport()
        network.due(2.0)
        with pytest.raises(ValueError, match="already"):
            network.due(again)
        with pytest.raises(ValueError, match="already"):
            network.send("a", "b", b"", again)

    def test_an_endpoint_may_write_to_itself(self) -> None:
        network = VirtualTransport(Link(latency_seconds=1.0))
        network.send("a", "a", b"note", 0.0)
        assert [each.receiver for each in network.due(1.0)] == ["a"]


class TestBytes:
    def test_the_network_keeps_a_copy(self) -> None:
        network, buffer = VirtualTransport(), bytearray(b"before")
        network.send("a", "b", memoryview(buffer)[1:], 0.0)
        buffer[:] = b"after!"
        assert network.due(0.0)[0].payload == b"efore"

    @pytest.mark.parametrize("payload", ["text", 7, None])
    def test_nothing_but_bytes(self, payload: object) -> None:
        with pytest.raises(TypeError):
            VirtualTransport().send("a", "b", payload, 0.0)  # type: ignore[arg-type]

    def test_empty_messages_are_messages(self) -> None:
        assert sent(VirtualTransport(Link(bandwidth_bytes=1.0)), 0) == []
        network = VirtualTransport()
        network.send("a", "b", b"", 0.0)
        assert [each.payload for each in network.due(0.0)] == [b""]


class TestChance:
    @pytest.mark.parametrize("loss", [0.02, 0.3, 0.9])
    def test_loss_is_as_often_as_said(self, loss: float) -> None:
        network = VirtualTransport(Link(loss=loss), seed=5)
        arrived, count = sent(network, 4_000), 4_000
        spread = math.sqrt(count * loss * (1 - loss))
        assert abs(count - len(arrived) - loss * count) < 4 * spread
        assert network.stats("a", "b").lost == count - len(arrived)

    def test_certain_and_impossible_loss(self) -> None:
        assert sent(VirtualTransport(Link(loss=1.0)), 500) == []
        assert len(sent(VirtualTransport(Link(loss=0.0)), 500)) == 500

    @pytest.mark.parametrize("duplication", [0.1, 0.5])
    def test_copies_are_as_often_as_said(self, duplication: float) -> None:
        network = VirtualTransport(Link(duplication=duplication), seed=6)
        copies = Counter(numbers(sent(network, 4_000)))
        twice = sum(1 for count in copies.values() if count == 2)
        assert set(copies.values()) == {1, 2}
        spread = math.sqrt(4_000 * duplication * (1 - duplication))
        assert abs(twice - duplication * 4_000) < 4 * spread
        assert network.stats("a", "b").duplicated == twice

    def test_what_is_lost_has_no_copy(self) -> None:
        network = VirtualTransport(Link(loss=0.5, duplication=1.0), seed=1)
        assert set(Counter(numbers(sent(network, 400))).values()) == {2}

    def test_jitter_reorders_within_its_bounds(self) -> None:
        network = VirtualTransport(Link(latency_seconds=2.0, jitter_seconds=0.5), seed=2)
        arrived = sent(network, 500)
        assert numbers(arrived) != sorted(numbers(arrived))
        assert sorted(numbers(arrived)) == list(range(500))
        delays = [each.due_seconds for each in arrived]
        assert delays == sorted(delays)
        assert 2.0 <= delays[0] < 2.02
        assert 2.48 < delays[-1] < 2.5

    def test_copies_are_late_each_by_itself(self) -> None:
        network = VirtualTransport(Link(duplication=1.0, jitter_seconds=1.0), seed=3)
        network.send("a", "b", b"x", 0.0)
        first, second = network.due(LATE)
        assert first.due_seconds != second.due_seconds
        assert replace(first, due_seconds=0.0) == replace(second, due_seconds=0.0)

    def test_the_seed_decides(self) -> None:
        link = Link(loss=0.3, duplication=0.2, jitter_seconds=1.0)
        once, again, other = (sent(VirtualTransport(link, seed), 200) for seed in (7, 7, 8))
        assert once == again
        assert once != other

    def test_one_links_traffic_changes_no_other_links_fate(self) -> None:
        link = Link(loss=0.3, duplication=0.2, jitter_seconds=1.0)
        alone, shared = VirtualTransport(link), VirtualTransport(link)
        for number in range(100):
            alone.send("a", "b", number.to_bytes(4), 0.0)
            shared.send("c", "b", b"noise", 0.0)
            shared.send("a", "b", number.to_bytes(4), 0.0)
            shared.send("b", "a", b"noise", 0.0)
        assert alone.due(LATE) == [each for each in shared.due(LATE) if each.sender == "a"]

    def test_names_cannot_be_taken_for_other_names(self) -> None:
        network = VirtualTransport(Link(loss=0.5))
        fates = []
        for sender, receiver in [("a", "b', 'c"), ("a', 'b", "c")]:
            for number in range(64):
                network.send(sender, receiver, number.to_bytes(4), 0.0)
            fates.append(numbers(network.due(0.0)))
        assert fates[0] != fates[1]


class TestOrder:
    @given(
        st.lists(st.tuples(st.floats(0, 5), st.integers(0, 300)), min_size=1, max_size=40),
        st.floats(0, 3),
        st.sampled_from([1.0, 100.0, math.inf]),
        st.floats(0, 0.5),
        st.integers(0, 1_000),
    )
    def test_a_link_without_jitter_is_first_in_first_out(
        self,
        messages: list[tuple[float, int]],
        latency_seconds: float,
        bandwidth_bytes: float,
        loss: float,
        seed: int,
    ) -> None:
        link = Link(latency_seconds, bandwidth_bytes, loss, duplication=0.3)
        network, now_seconds = VirtualTransport(link, seed), 0.0
        for gap_seconds, size in messages:
            now_seconds += gap_seconds
            network.send("a", "b", bytes(size), now_seconds)
        arrived = network.due(LATE)
        order = [each.number for each in arrived]
        assert order == sorted(order)
        for each in arrived:
            wire_seconds = len(each.payload) / bandwidth_bytes
            assert each.due_seconds >= each.sent_seconds + latency_seconds + wire_seconds - 1e-6

    def test_a_faster_link_does_not_overtake_the_slower_one_it_replaces(self) -> None:
        network = VirtualTransport(Link(latency_seconds=9.0))
        network.send("a", "b", b"slow", 0.0)
        network.set_link("a", "b", Link(latency_seconds=1.0))
        network.send("a", "b", b"fast", 0.0)
        assert [each.payload for each in network.due(LATE)] == [b"slow", b"fast"]

    def test_ties_between_links_go_by_sending(self) -> None:
        network = VirtualTransport(Link(latency_seconds=1.0))
        for sender in ("c", "a", "b"):
            network.send(sender, "z", b"", 0.0)
        assert [each.sender for each in network.due(1.0)] == ["c", "a", "b"]

    @given(st.lists(st.floats(0, 30), max_size=20), st.integers(0, 100))
    def test_when_one_looks_changes_nothing(self, looks: list[float], seed: int) -> None:
        link = Link(0.5, 40.0, loss=0.2, duplication=0.2, jitter_seconds=3.0)
        patient, curious = VirtualTransport(link, seed), VirtualTransport(link, seed)
        for network in (patient, curious):
            for number in range(30):
                network.send("a", "b", number.to_bytes(4), 0.0)
        seen = [each for at in sorted(looks) for each in curious.due(at)]
        assert [*seen, *curious.due(LATE)] == patient.due(LATE)


class TestPartitions:
    def test_nothing_crosses_in_either_direction(self) -> None:
        network = VirtualTransport()
        network.partition({"a", "b"}, {"c"})
        for sender, receiver in [("a", "c"), ("c", "a"), ("b", "c"), ("a", "b"), ("c", "c")]:
            network.send(sender, receiver, b"", 0.0)
        assert [(e.sender, e.receiver) for e in network.due(LATE)] == [("a", "b"), ("c", "c")]
        assert network.total().cut == 3

    def test_one_direction_alone(self) -> None:
        network = VirtualTransport()
        network.cut("a", "b")
        network.send("a", "b", b"", 0.0)
        network.send("b", "a", b"", 0.0)
        assert [each.sender for each in network.due(LATE)] == ["b"]

    def test_what_is_on_its_way_is_gone_even_if_healed_before_it_is_due(self) -> None:
        network = VirtualTransport(Link(latency_seconds=2.0))
        network.send("a", "b", b"before", 0.0)
        network.partition(["a"], ["b"])
        network.heal()
        network.send("a", "b", b"after", 1.0)
        assert network.next_seconds() == 2.0
        assert [each.payload for each in network.due(LATE)] == [b"after"]
        assert network.stats("a", "b") == LinkStats(
            sent=2, delivered=1, cut=1, sent_bytes=11, delivered_bytes=5
        )

    def test_what_has_arrived_but_was_not_taken_is_gone_too(self) -> None:
        network = VirtualTransport()
        network.send("a", "b", b"", 0.0)
        network.cut("a", "b")
        assert network.due(LATE) == []

    def test_a_cut_link_costs_no_bandwidth(self) -> None:
        network = VirtualTransport(Link(bandwidth_bytes=1.0))
        network.cut("a", "b")
        network.send("a", "b", bytes(100), 0.0)
        network.heal()
        network.send("a", "b", bytes(1), 0.0)
        assert [each.due_seconds for each in network.due(LATE)] == [1.0]

    def test_healing_leaves_losses_to_chance_as_they_were(self) -> None:
        cut, whole = (VirtualTransport(Link(loss=0.5), seed=4) for _ in range(2))
        for network in (cut, whole):
            sent(network, 10)
        cut.partition(["a"], ["b"])
        for network in (cut, whole):
            network.send("a", "b", b"\0\0\0\xff", LATE)
        assert cut.due(LATE) == []
        cut.heal()
        later = [numbers(sent_later(network)) for network in (cut, whole)]
        assert later[0] == [each for each in later[1] if each != 255]


def sent_later(network: VirtualTransport) -> list[Delivery]:
    for number in range(50):
        network.send("a", "b", number.to_bytes(4), LATE)
    return network.due(LATE)


class TestLinks:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"loss": 1.1},
            {"loss": math.nan},
            {"duplication": -0.1},
            {"latency_seconds": -1.0},
            {"latency_seconds": math.inf},
            {"jitter_seconds": math.nan},
            {"bandwidth_bytes": 0.0},
            {"bandwidth_bytes": math.nan},
        ],
    )
    def test_numbers_in_range(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=r"Link\("):
            Link(**wrong)

    def test_one_link_may_differ(self) -> None:
        network = VirtualTransport()
        network.set_link("a", "b", Link(latency_seconds=4.0))
        network.send("a", "b", b"", 0.0)
        network.send("b", "a", b"", 0.0)
        assert [each.due_seconds for each in network.due(LATE)] == [0.0, 4.0]


ENDPOINTS = st.sampled_from(["a", "b", "c"])
LINKS = st.builds(
    Link,
    st.floats(0, 2),
    st.sampled_from([5.0, 1_000.0, math.inf]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 1.0]),
)


class AnyNetwork(RuleBasedStateMachine):
    """Any traffic over any links, cut and healed at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.network = VirtualTransport(Link(1.0, jitter_seconds=0.5, duplication=0.2), seed=9)
        self.now_seconds = 0.0
        self.said: dict[tuple[str, str], list[bytes]] = {}
        self.heard: Counter[tuple[str, str, int]] = Counter()

    @rule(sender=ENDPOINTS, receiver=ENDPOINTS, payload=st.binary(max_size=30))
    def send(self, sender: str, receiver: str, payload: bytes) -> None:
        self.said.setdefault((sender, receiver), []).append(payload)
        self.network.send(sender, receiver, payload, self.now_seconds)

    @rule(sender=ENDPOINTS, receiver=ENDPOINTS, link=LINKS)
    def relink(self, sender: str, receiver: str, link: Link) -> None:
        self.network.set_link(sender, receiver, link)

    @rule(side=st.sets(ENDPOINTS), other=st.sets(ENDPOINTS))
    def partition(self, side: set[str], other: set[str]) -> None:
        self.network.partition(side, other)

    @rule()
    def heal(self) -> None:
        self.network.heal()

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now_seconds += seconds
        self.take()

    @precondition(lambda self: self.network.next_seconds() is not None)
    @rule()
    def wait_for_the_next(self) -> None:
        self.now_seconds = max(self.now_seconds, self.network.next_seconds() or 0.0)
        self.take()

    def take(self) -> None:
        for each in self.network.due(self.now_seconds):
            assert self.said[each.sender, each.receiver][each.number] == each.payload
            assert each.sent_seconds <= each.due_seconds <= self.now_seconds
            self.heard[each.sender, each.receiver, each.number] += 1

    @invariant()
    def nothing_is_overdue_or_heard_thrice(self) -> None:
        next_seconds = self.network.next_seconds()
        assert next_seconds is None or next_seconds >= 0.0
        assert all(count <= 2 for count in self.heard.values())

    @invariant()
    def every_message_is_accounted_for(self) -> None:
        total = self.network.total()
        assert total.sent == sum(len(messages) for messages in self.said.values())
        assert total.delivered == self.heard.total()
        gone = total.delivered + total.lost + total.cut + total.in_flight
        assert total.sent + total.duplicated == gone


TestAnyNetwork = AnyNetwork.TestCase
TestAnyNetwork.settings = machine(30, 0.2)


def test_the_example_in_the_documentation() -> None:
    found = doctest.testmod(transport)
    assert (found.attempted, found.failed) == (4, 0)
