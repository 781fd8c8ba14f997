"""The front's end of a serving instance, for tests of its loop."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvell.engine.protocol.codec import decode_event, encode_frame
from kvell.engine.protocol.messages import (
    Acknowledgement,
    Command,
    Event,
    Heartbeat,
    Submit,
    Tokens,
)
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.serving.lone import serve_instance
from kvell.testing.instance import FakeEngine
from kvell.vocabulary import RequestId
from kvell.wire.frames import FrameReader

WAIT_SECONDS = 20.0
FOREVER = 1 << 30


def submit(name: str, max_tokens: int = 3) -> Submit:
    prompt = np.frombuffer(name.encode(), np.uint8).astype("<i4").tobytes()
    return Submit(RequestSpec(RequestId(name), prompt, SamplingParams(max_tokens=max_tokens)))


def tokens_of(events: list[Event], name: str) -> list[int]:
    found = [e for e in events if isinstance(e, Tokens) and e.request_id == name]
    assert [e.first_index for e in found] == list(range(len(found)))
    return [token for event in found for token in event.token_ids]


class Peer:
    """Reads events; heartbeats come at any time, and are kept apart."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._reader = FrameReader()
        self._events: list[Event] = []
        self.beats: list[Heartbeat] = []
        sock.settimeout(WAIT_SECONDS)

    def send(self, *commands: Command) -> None:
        self.socket.sendall(b"".join(encode_frame(command) for command in commands))

    def read_any(self) -> Event | None:
        while not self._events:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._events = [decode_event(body) for body in self._reader.feed(data)]
        event = self._events.pop(0)
        if isinstance(event, Heartbeat):
            self.beats.append(event)
        return event

    def read(self) -> Event | None:
        while isinstance(event := self.read_any(), Heartbeat):
            pass
        return event

    def read_all(self) -> list[Event]:
        return list(iter(self.read, None))

    def read_all_and_beats(self) -> list[Event]:
        events: list[Event] = []
        while (event := self.read_any()) is not None:
            events.append(event)
        return events

    def read_until(self, kind: type[Event]) -> list[Event]:
        events: list[Event] = []
        while not events or not isinstance(events[-1], kind):
            event = self.read()
            assert event is not None, f"the instance ended before {kind.__name__}"
            events.append(event)
        return events

    def read_beats(self, count: int) -> None:
        """Read until so many heartbeats came; nothing else may come before."""
        while len(self.beats) < count:
            event = self.read_any()
            assert isinstance(event, Heartbeat | Acknowledgement)

    def has_more(self) -> bool:
        """Whether anything was sent that is not read yet."""
        if self._events:
            return True
        self.socket.setblocking(False)
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        finally:
            self.socket.settimeout(WAIT_SECONDS)


@contextlib.contextmanager
def serving(
    engine: FakeEngine, *, send_buffer_bytes: int | None = None, **options: Any
) -> Iterator[tuple[Peer, threading.Thread]]:
    ours, theirs = socket.socketpair()
    if send_buffer_bytes is not None:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)

    def run() -> None:
        with theirs:
            serve_instance(engine, theirs, **options)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with ours:
            yield Peer(ours), thread
    finally:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
