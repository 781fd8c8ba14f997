"""An instance of several fronts: each hears of its own, and may go and come as it likes."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvell.clock import VirtualClock
from kvell.engine.protocol.messages import (
    FRONT_LEASE_SECONDS,
    AskStats,
    Command,
    Drain,
    Drained,
    Event,
    Finished,
    KeepAlive,
    Ready,
    Submit,
    Tokens,
)
from kvell.engine.protocol.notices import IndexNotice, WatchIndex
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.statistics import Stats
from kvell.serving.fronts import UNREAD_SECONDS, FrontListener
from kvell.serving.loop import serve_fronts
from kvell.testing.instance import FakeEngine, fake_token
from kvell.vocabulary import RequestId
from kvell.wire.blocking import BlockingSocket
from kvell.wire.endpoints import connect_to
from kvell.wire.greeting import Greeting
from kvell.wire.session import open_session
from tests.serving.peer import FOREVER, WAIT_SECONDS, Peer, tokens_of

SECRET = bytes(range(32))
QUICK_SECONDS = 0.005


def submit(name: str, max_tokens: int = 3) -> Submit:
    return Submit(RequestSpec(RequestId(name), b"\7\0\0\0", SamplingParams(max_tokens=max_tokens)))


class NoticingEngine(FakeEngine):
    """Tells of its index with every step once it was asked to; a request may come by itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.notices: int | None = None
        self.ended: list[tuple[str, str]] = []
        self.comes: list[Submit] = []
        self.num_steps = 0

    def handle(self, command: Command) -> list[Event]:
        if isinstance(command, WatchIndex):
            self.notices = self.notices or 0
        return self.noted(super().handle(command))

    def has_work(self) -> bool:
        return super().has_work() or bool(self.comes)

    def step(self) -> list[Event]:
        while self.comes:
            super().handle(self.comes.pop())
        told = super().step()
        self.num_steps += 1
        if self.notices is not None:
            self.notices += 1
            told.append(IndexNotice(self.notices - 1, ()))
        return self.noted(told)

    def noted(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Finished):
                self.ended.append((event.request_id, event.reason))
        return events


@dataclass
class Shared:
    door: FrontListener
    engine: NoticingEngine
    thread: threading.Thread

    @contextlib.contextmanager
    def front(self, name: str, incarnation: int = 1) -> Iterator[Peer]:
        """Come in as a front, and hear that the instance is ready."""
        with connect_to(self.door.address, WAIT_SECONDS) as sock:
            told = Greeting(name, incarnation, "", 0)
            open_session(BlockingSocket(sock), told, SECRET, "commands")
            peer = Peer(sock)
            assert isinstance(peer.read_any(), Ready)
            yield peer

    def ended(self, watcher: Peer, *requests: tuple[str, str]) -> None:
        """Wait until requests have ended so; the instance's life is told by its heartbeats."""
        while not set(requests) <= set(self.engine.ended):
            watcher.read_beats(len(watcher.beats) + 1)


Serve = Callable[..., contextlib.AbstractContextManager[Shared]]


@contextlib.contextmanager
def shared(engine: NoticingEngine | None = None, **options: Any) -> Iterator[Shared]:
    engine = engine or NoticingEngine(step_seconds=0.001)
    options = {"heartbeat_seconds": QUICK_SECONDS, **options}
    reads, writes = os.pipe()
    with FrontListener("127.0.0.1", SECRET, "mixed-0", 7) as door:
        door.ends_with(reads)
        run = threading.Thread(target=serve_fronts, args=(engine, door), kwargs=options)
        run.start()
        try:
            yield Shared(door, engine, run)
        finally:
            os.close(writes)
            run.join(WAIT_SECONDS)
            assert not run.is_alive()


def test_each_front_hears_of_its_own_requests() -> None:
    with shared() as instance, instance.front("a") as a, instance.front("b") as b:
        a.send(submit("a:1", 20))
        b.send(submit("b:1", 30), AskStats())
        told_b = b.read_until(Stats)
        told_b += b.read_until(Finished)
        told_a = a.read_until(Finished)
        prompt = submit("x").spec.prompt
        assert tokens_of(told_a, "a:1") == [fake_token(prompt, i) for i in range(20)]
        assert tokens_of(told_b, "b:1") == [fake_token(prompt, i) for i in range(30)]
        assert {e.request_id for e in told_a if isinstance(e, Tokens)} == {"a:1"}
        assert not [one for one in told_a if isinstance(one, Stats)]


def test_a_front_that_goes_takes_its_requests_along_and_no_others() -> None:
    with shared() as instance, instance.front("b") as b:
        b.send(submit("b:1", FOREVER))
        with instance.front("a") as a:
            a.send(submit("a:1", FOREVER), submit("a:2", FOREVER))
            a.read_until(Tokens)
        while {"a:1", "a:2"} - {name for name, _ in instance.engine.ended}:
            b.read_until(Tokens)
        assert set(instance.engine.ended) == {("a:1", "cancelled"), ("a:2", "cancelled")}
        b.read_until(Tokens)


def test_a_front_that_comes_again_replaces_what_it_was() -> None:
    with shared() as instance, instance.front("a") as before:
        before.send(submit("a:1", FOREVER))
        before.read_until(Tokens)
        with instance.front("a") as after:
            before.read_all()  # until it is hung up on
            after.send(submit("a:1", 4))
            events = after.read_until(Finished)
            assert len(tokens_of(events, "a:1")) == 4
        assert instance.engine.ended[0] == ("a:1", "cancelled")


def test_a_front_in_silence_loses_what_it_has() -> None:
    """Its connection is open, as behind a network that has broken."""
    clock = VirtualClock()
    with (
        shared(clock=clock, heartbeat_seconds=0.0) as instance,
        instance.front("a") as a,
        instance.front("b") as b,
    ):
        a.send(submit("a:1", FOREVER))
        b.send(submit("b:1", FOREVER))
        a.read_until(Tokens)
        clock.advance(FRONT_LEASE_SECONDS - 1)
        b.send(KeepAlive(), AskStats())
        b.read_until(Stats)
        assert instance.engine.ended == []
        clock.advance(2.0)
        while not instance.engine.ended:
            b.read_until(Tokens)
        assert instance.engine.ended == [("a:1", "cancelled")]
        a.read_all()  # until it is hung up on


def test_a_front_that_does_not_read_is_hung_up_on() -> None:
    """The others only wait for so long."""
    clock = VirtualClock()
    engine = NoticingEngine()
    with (
        shared(engine, clock=clock, outgoing_limit_bytes=1 << 14) as instance,
        instance.front("slow") as slow,
        instance.front("b") as b,
    ):
        slow.send(*(submit(f"slow:{one}", FOREVER) for one in range(8)))
        slow.read_until(Tokens)
        seen = -1
        while engine.num_steps > seen:  # until it stops, since so much waits
            seen = engine.num_steps
            for _ in range(20):
                b.send(AskStats())
                b.read_until(Stats)
        clock.advance(UNREAD_SECONDS / 2)
        b.send(AskStats())
        b.read_until(Stats)
        assert engine.ended == []
        while not engine.ended:
            clock.advance(UNREAD_SECONDS)
            b.send(KeepAlive(), AskStats())
            b.read_until(Stats)
        b.send(submit("b:1", 5))
        assert len(tokens_of(b.read_until(Finished), "b:1")) == 5


def test_a_broken_front_ends_alone() -> None:
    with shared() as instance, instance.front("b") as b, instance.front("a") as a:
        a.send(submit("a:1", FOREVER))
        b.send(submit("b:1", FOREVER))
        a.read_until(Tokens)
        a.socket.sendall(b"this is not the protocol at all")
        a.read_all()
        while not instance.engine.ended:
            b.read_until(Tokens)
        assert instance.engine.ended == [("a:1", "cancelled")]


def test_beats_say_what_the_others_have() -> None:
    with shared() as instance, instance.front("a") as a, instance.front("b") as b:
        a.send(submit("a:1", FOREVER), submit("a:2", FOREVER))
        while not (b.beats and b.beats[-1].others.requests == 2):
            b.read_beats(len(b.beats) + 1)
        while not (a.beats and a.beats[-1].load.running == 2):
            a.read_any()
        assert {beat.others.requests for beat in a.beats} == {0}


def test_notices_go_to_those_who_watch() -> None:
    with shared() as instance, instance.front("a") as a, instance.front("b") as b:
        b.send(WatchIndex(with_tokens=False))
        a.send(submit("a:1", 5))
        told = a.read_until(Finished)
        assert not [one for one in told if isinstance(one, IndexNotice)]
        assert [b.read_until(IndexNotice)[-1] for _ in range(5)] == [
            IndexNotice(number, ()) for number in range(5)
        ]


def test_what_came_for_a_front_that_is_not_here_is_cancelled() -> None:
    """Another instance handed it over, and its front has gone meanwhile."""
    with shared() as instance, instance.front("a") as a:
        instance.engine.comes.append(submit("gone:1", FOREVER))
        a.send(submit("a:1", 2))  # so that the loop wakes
        a.read_until(Finished)
        instance.ended(a, ("gone:1", "cancelled"))


@pytest.mark.parametrize("stays", [True, False])
def test_a_drained_instance_tells_all_and_ends(stays: bool) -> None:
    with shared() as instance, instance.front("manager") as manager, instance.front("a") as a:
        a.send(submit("a:1", 40))
        a.read_until(Tokens)
        manager.send(Drain())
        if stays:
            told = a.read_all()
            assert isinstance(told[-1], Drained)
            assert isinstance(told[-2], Finished)
        else:
            a.socket.close()
        assert isinstance(manager.read_all()[-1], Drained)
        instance.thread.join(WAIT_SECONDS)
        assert not instance.thread.is_alive()


def test_a_request_of_anothers_name_is_refused_and_told() -> None:
    with shared() as instance, instance.front("a") as a:
        a.send(submit("b:1"))
        [refused] = a.read_until(Finished)
        assert isinstance(refused, Finished)
        assert (refused.reason, refused.request_id) == ("refused", "b:1")


@pytest.mark.long
def test_a_front_that_hovers_below_its_bound_is_hung_up_on() -> None:
    """It reads a little whenever the others have waited for long, and never all."""
    clock = VirtualClock()
    engine = NoticingEngine()
    bound_bytes = 1 << 14
    with (
        shared(engine, clock=clock, outgoing_limit_bytes=bound_bytes) as instance,
        instance.front("hovers") as hovers,
        instance.front("b") as b,
    ):
        hovers.send(*(submit(f"hovers:{one}", FOREVER) for one in range(8)))
        hovers.read_until(Tokens)
        pauses = 0
        while not engine.ended and pauses < 400:
            seen = -1
            while engine.num_steps > seen:  # until the others wait
                seen = engine.num_steps
                b.send(KeepAlive(), AskStats())
                b.read_until(Stats)
            pauses += 1
            clock.advance(UNREAD_SECONDS / 4)
            b.send(KeepAlive(), AskStats())
            b.read_until(Stats)
            with contextlib.suppress(ConnectionError):  # it has been hung up on
                hovers.send(KeepAlive())
                while engine.num_steps == seen and hovers.socket.recv(bound_bytes):
                    b.send(KeepAlive(), AskStats())
                    b.read_until(Stats)
        assert {name for name, _ in engine.ended} >= {"hovers:0"}
        assert pauses > 4, "a single pause is forgiven"


def test_a_front_that_was_greeted_late_does_not_end_its_newer_connection() -> None:
    with shared() as instance, instance.front("a", incarnation=2) as newer:
        newer.send(submit("a:1", FOREVER))
        newer.read_until(Tokens)
        with connect_to(instance.door.address, WAIT_SECONDS) as late:
            told = Greeting("a", 1, "", 0)
            open_session(BlockingSocket(late), told, SECRET, "commands")
            late.settimeout(WAIT_SECONDS)
            assert late.recv(1) == b"", "it is hung up on"
        newer.send(AskStats())
        told_newer = newer.read_until(Stats)
        assert isinstance(told_newer[-1], Stats) and told_newer[-1].running == 1
        assert instance.engine.ended == []
