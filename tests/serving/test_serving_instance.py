"""The instance's loop over a real socket pair, and the same protocol in one process."""

import os
import signal
import socket
import threading

import pytest

from kvell.engine.protocol.codec import encode_frame
from kvell.engine.protocol.messages import (
    AskStats,
    Cancel,
    Command,
    Drain,
    Drained,
    Event,
    Finished,
    Ready,
    Tokens,
)
from kvell.engine.protocol.statistics import Stats
from kvell.serving.gate import CommandGate, lone_owner
from kvell.serving.lone import LocalInstance, serve_instance
from kvell.testing.instance import FakeEngine, fake_token
from kvell.vocabulary import RequestId
from kvell.wire.frames import ProtocolError, frame
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
