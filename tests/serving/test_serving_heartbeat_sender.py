"""Heartbeats of a serving instance: idle, between steps and during a step."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvell.clock import VirtualClock
from kvell.engine.protocol.codec import decode_event
from kvell.engine.protocol.messages import (
    NO_OTHERS,
    Cancel,
    Drain,
    Drained,
    Event,
    Finished,
    Heartbeat,
    Ready,
    Tokens,
)
from kvell.engine.protocol.statistics import LoadStats
from kvell.serving.fronts import Arrival, Fronts
from kvell.serving.gate import LONE, lone_owner
from kvell.serving.loop import HeartbeatSchedule, HeartbeatSender
from kvell.testing.instance import POOL_BYTES, TOKEN_BYTES, FakeEngine, fake_token
from kvell.vocabulary import RequestId
from kvell.wire.frames import FrameReader
from tests.serving.peer import FOREVER, WAIT_SECONDS, serving, submit, tokens_of

QUICK_SECONDS = 0.005
LOOKS = 8
"""Reads of the clock by a thread that surely looked several times in between."""


class Blocking(FakeEngine):
    """Its steps wait to be released; it notes by whom and how often its pulse is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()
        self.pulses: list[int] = []

    def pulse(self) -> LoadStats:
        self.pulses.append(threading.get_ident())
        return super().pulse()

    def step(self) -> list[Event]:
        self.entered.set()
        assert self.released.wait(WAIT_SECONDS)
        return super().step()


class WatchedClock(VirtualClock):
    """Says how often it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def now_seconds(self) -> float:
        self.reads += 1
        return super().now_seconds()


@pytest.fixture
def engine() -> Iterator[Blocking]:
    engine = Blocking()
    yield engine
    engine.released.set()


def test_the_first_beat_follows_ready_and_an_idle_instance_beats_on() -> None:
    with serving(FakeEngine(incarnation=7), heartbeat_seconds=QUICK_SECONDS) as (peer, _):
        assert isinstance(peer.read_any(), Ready)
        peer.read_beats(5)
    beat = Heartbeat(LoadStats(0, 0, 0, 4, 4, POOL_BYTES, POOL_BYTES))
    assert peer.beats == [beat] * 5


def test_heartbeats_come_during_a_step_and_repeat_the_last_pulse(engine: Blocking) -> None:
    with serving(engine, heartbeat_seconds=QUICK_SECONDS) as (peer, serving_thread):
        request = submit("abc")
        peer.send(request)
        assert engine.entered.wait(WAIT_SECONDS)
        assert isinstance(peer.read_any(), Ready)
        of_the_loop = len(engine.pulses)
        peer.read_beats(of_the_loop + 3)
        assert len(engine.pulses) == of_the_loop
        assert peer.beats[-3:] == [peer.beats[of_the_loop - 1]] * 3
        engine.released.set()
        events = peer.read_until(Finished)
        assert tokens_of(events, "abc") == [fake_token(request.spec.prompt, i) for i in range(3)]
        while peer.beats[-1].load.step < 3:
            assert isinstance(peer.read_any(), Heartbeat)
        assert peer.beats[-1].load.free_bytes == POOL_BYTES
        assert set(engine.pulses) == {serving_thread.ident}


def test_a_loop_that_hangs_falls_silent_until_it_goes_on(engine: Blocking) -> None:
    clock = WatchedClock()
    with serving(
        engine, heartbeat_seconds=QUICK_SECONDS, longest_step_seconds=10.0, clock=clock
    ) as (peer, _):
        peer.send(submit("a", 1))
        assert engine.entered.wait(WAIT_SECONDS)
        clock.advance(9.0)
        assert isinstance(peer.read_any(), Ready)
        peer.read_beats(2)
        clock.advance(2.0)
        until = clock.reads + LOOKS
        while clock.reads < until:
            time.sleep(QUICK_SECONDS)
        assert not peer.has_more()
        engine.released.set()
        peer.read_until(Finished)
        peer.read_beats(3)
        assert peer.beats[-1].load.step == 1


def test_no_beat_follows_drained_and_no_thread_is_left() -> None:
    with serving(FakeEngine(step_seconds=0.001), heartbeat_seconds=0.0002) as (peer, thread):
        peer.send(submit("a", 50), Drain())
        events = peer.read_all_and_beats()
        thread.join(WAIT_SECONDS)
        assert "kvell-heart" not in {each.name for each in threading.enumerate()}
    assert isinstance(events[-1], Drained)
    assert len(tokens_of(events, "a")) == 50
    assert len(peer.beats) > 1


class Flooding(FakeEngine):
    """Each step tells more than the send buffer holds, and takes as long as several beats."""

    def __init__(self) -> None:
        super().__init__(step_seconds=0.002)
        self.pulses = self.floods = 0

    def pulse(self) -> LoadStats:
        self.pulses += 1
        return super().pulse()

    def step(self) -> list[Event]:
        flood = Tokens(RequestId("flood"), 0, self.floods, tuple(range(3000)))
        self.floods += 1
        return [flood, *super().step()]


def test_frames_of_both_threads_stay_whole_where_the_send_buffer_is_tiny() -> None:
    engine, floods, events = Flooding(), 0, list[Event]()
    with serving(engine, send_buffer_bytes=2048, heartbeat_seconds=0.0003) as (peer, _):
        peer.send(submit("a", FOREVER))
        while floods < 60 or len(peer.beats) < engine.pulses + 20:
            event = peer.read_any()
            assert event is not None
            if isinstance(event, Tokens) and event.request_id == "flood":
                assert (event.first_index, event.token_ids) == (floods, tuple(range(3000)))
                floods += 1
            else:
                events.append(event)
        peer.send(Cancel(RequestId("a")))
        events += peer.read_until(Finished)
    assert len(tokens_of(events, "a")) >= floods - 1


def test_what_waits_is_sent_instead_of_a_beat_and_a_full_buffer_takes_none() -> None:
    ours, theirs = socket.socketpair()
    clock, fake = VirtualClock(), FakeEngine()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        fronts = Fronts(1, fake.pulse, lambda _front: NO_OTHERS, lone_owner)
        front = fronts.add(Arrival(LONE, theirs), fake.ready(), 0.0)
        large = Tokens(RequestId("a"), 0, 0, tuple(range(9000)))
        front.send([large])
        assert front.full
        heart = HeartbeatSender(fronts, clock, HeartbeatSchedule(1.0, 10.0))
        heart.works()
        reader, received = FrameReader(), list[Event]()
        while front.pending:
            received += [decode_event(body) for body in reader.feed(ours.recv(1 << 16))]
            front.beat_again()
        received += [decode_event(body) for body in reader.feed(ours.recv(1 << 16))]
        assert received[1:] == [large]
        clock.advance(1.0)
        heart.works()
        assert [decode_event(body) for body in reader.feed(ours.recv(4096))] == [
            Heartbeat(fake.pulse())
        ]


def test_the_fake_engine_has_less_free_memory_the_more_tokens_its_requests_have() -> None:
    fake = FakeEngine()
    fake.handle(submit("abcd", 2))
    assert fake.pulse().free_bytes == POOL_BYTES - 4 * TOKEN_BYTES
    fake.step()
    assert fake.pulse() == LoadStats(1, 1, 0, 4, 4, POOL_BYTES - 5 * TOKEN_BYTES, POOL_BYTES)
    fake.step()
    assert fake.pulse().free_bytes == POOL_BYTES
