"""The instance's loop over a real socket pair, its heartbeats, and the protocol in one process."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvell.clock import VirtualClock
from kvell.engine.protocol.codec import decode_event, encode_frame
from kvell.engine.protocol.messages import (
    NO_OTHERS,
    AskStats,
    Cancel,
    Command,
    Drain,
    Drained,
    Event,
    Finished,
    Heartbeat,
    Ready,
    Tokens,
)
from kvell.engine.protocol.statistics import LoadStats, Stats
from kvell.serving.fronts import Arrival, Fronts
from kvell.serving.gate import LONE, CommandGate, lone_owner
from kvell.serving.lone import LocalInstance, serve_instance
from kvell.serving.loop import HeartbeatSchedule, HeartbeatSender
from kvell.testing.instance import POOL_BYTES, TOKEN_BYTES, FakeEngine, fake_token
from kvell.vocabulary import RequestId
from kvell.wire.frames import FrameReader, ProtocolError, frame
from tests.serving.peer import (
    FOREVER,
    WAIT_SECONDS,
    Peer,
    serving,
    submit,
    tokens_of,
)


def test_ready_comes_first_and_a_request_is_served_in_order() -> None:
    with serving(FakeEngine()) as (peer, _):
        assert isinstance(peer.read(), Ready)
        request = submit("hello")
        peer.send(request)
        events = peer.read_until(Finished)
        assert tokens_of(events, "hello") == [fake_token(request.spec.prompt, i) for i in range(3)]
        last = events[-1]
        assert isinstance(last, Finished)
        assert (last.reason, last.output_tokens) == ("length", 3)


def test_commands_are_read_while_there_is_work() -> None:
    engine = FakeEngine()
    with serving(engine) as (peer, _):
        peer.send(submit("endless", FOREVER))
        peer.read_until(Tokens)
        peer.send(AskStats(), Cancel(RequestId("endless")))
        stats = peer.read_until(Stats)[-1]
        assert isinstance(stats, Stats)
        assert stats.running == 1
        finished = peer.read_until(Finished)[-1]
        assert isinstance(finished, Finished)
        assert finished.reason == "cancelled"


def test_a_submission_beyond_the_credits_is_refused_and_a_finish_gives_one_back() -> None:
    with serving(FakeEngine(credits=1)) as (peer, _):
        peer.send(submit("first", FOREVER), submit("second"))
        refused = peer.read_until(Finished)[-1]
        assert isinstance(refused, Finished)
        assert (refused.request_id, refused.reason) == ("second", "refused")
        assert refused.try_later
        peer.send(Cancel(RequestId("first")))
        peer.read_until(Finished)
        peer.send(submit("third"))
        assert len(tokens_of(peer.read_until(Finished), "third")) == 3


def test_drain_finishes_what_runs_refuses_what_comes_and_ends() -> None:
    with serving(FakeEngine(step_seconds=0.001)) as (peer, _):
        peer.send(submit("running", 20), Drain(), submit("late"))
        events = peer.read_all()
    reasons = {e.request_id: e.reason for e in events if isinstance(e, Finished)}
    assert reasons == {"running": "length", "late": "refused"}
    assert len(tokens_of(events, "running")) == 20
    assert isinstance(events[-1], Drained)
    assert sum(isinstance(event, Drained) for event in events) == 1


def test_drain_of_an_idle_instance_ends_at_once() -> None:
    with serving(FakeEngine()) as (peer, _):
        peer.send(Drain())
        assert [type(event) for event in peer.read_all()] == [Ready, Drained]


def test_when_the_peer_closes_everything_is_cancelled() -> None:
    engine = FakeEngine(step_seconds=0.001)
    with serving(engine) as (peer, _):
        peer.send(submit("a", FOREVER), submit("b", FOREVER))
        peer.read_until(Tokens)
    assert engine.finished == {"cancelled": 2}
    assert not engine.has_work()


def test_a_peer_that_does_not_read_stops_the_engine_until_it_does() -> None:
    steps = threading.Semaphore(0)

    class Counting(FakeEngine):
        count = 0

        def step(self) -> list[Event]:
            self.count += 1
            steps.release()
            return super().step()

    engine = Counting()
    total = 20_000
    with serving(engine, outgoing_limit_bytes=4096) as (peer, _):
        peer.send(submit("long", total))
        while steps.acquire(timeout=0.2):
            pass
        stalled_at = engine.count
        assert 0 < stalled_at < total
        assert len(tokens_of(peer.read_until(Finished), "long")) == total


def test_a_peer_that_speaks_garbage_ends_the_loop_with_an_error() -> None:
    ours, theirs = socket.socketpair()

    class Interrupted(FakeEngine):
        def step(self) -> list[Event]:
            ours.sendall(frame(b"\xc1"))
            return super().step()

    engine = Interrupted()
    with ours, theirs:
        ours.sendall(encode_frame(submit("a", FOREVER)))
        with pytest.raises(ProtocolError):
            serve_instance(engine, theirs)
    assert engine.finished == {"cancelled": 1}


def test_sigterm_drains() -> None:
    ours, theirs = socket.socketpair()
    events: list[Event] = []

    def front() -> None:
        peer = Peer(ours)
        peer.send(submit("running", 50))
        events.extend(peer.read_until(Tokens))
        os.kill(os.getpid(), signal.SIGTERM)
        events.extend(peer.read_all())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=front)
    thread.start()
    with theirs:
        serve_instance(FakeEngine(step_seconds=0.002), theirs)
    thread.join(WAIT_SECONDS)
    ours.close()
    assert len(tokens_of(events, "running")) == 50
    assert isinstance(events[-1], Drained)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_engine_that_says_drained_itself_does_not_end_the_loop_early() -> None:
    class Hasty(FakeEngine):
        def handle(self, command: Command) -> list[Event]:
            own: list[Event] = [Drained()] if isinstance(command, Drain) else []
            return own + super().handle(command)

    gate = CommandGate(Hasty(), lone_owner)
    gate.accept(submit("a", 1))
    assert gate.accept(Drain()) == []
    assert [type(event) for event in gate.advance()] == [Tokens, Finished, Drained]
    assert gate.accept(Drain()) == []


def test_a_request_id_in_flight_cannot_be_submitted_again() -> None:
    gate = CommandGate(FakeEngine(), lone_owner)
    gate.accept(submit("a"))
    [refused] = gate.accept(submit("a"))
    assert isinstance(refused, Finished)
    assert refused.reason == "refused"


def test_the_local_instance_speaks_the_same_protocol() -> None:
    local = LocalInstance(FakeEngine())
    request = submit("here", 2)
    local.send(request)
    events: list[Event] = []
    while local.has_work():
        events += local.poll()
    assert isinstance(events[0], Ready)
    assert tokens_of(events, "here") == [fake_token(request.spec.prompt, i) for i in range(2)]
    assert isinstance(events[-1], Finished)
    local.send(Drain())
    assert local.poll() == [Drained()]
    assert local.poll() == []


class Moving(FakeEngine):
    """An engine whose only request came from elsewhere, and is on its way to another."""

    has_one = True

    def has_requests(self) -> bool:
        return self.has_one or super().has_requests()


def test_a_request_that_needs_no_step_keeps_a_draining_instance() -> None:
    """One that moves would be lost, and none was submitted here."""
    engine = Moving()
    gate = CommandGate(engine, lone_owner)
    assert gate.accept(Drain()) == [] and not gate.drained
    assert gate.woken() == [] and not gate.drained
    engine.has_one = False
    assert gate.woken() == [Drained()] and gate.drained


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
