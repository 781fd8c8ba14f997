"""Strangers at everything that listens: whatever they do, an honest peer is let in."""

import ast
import asyncio
import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

import kvell
from kvell.fleet.manager.manager import ManagerFrontListener
from kvell.front.events.events_config import KvEventsConfig
from kvell.front.events.publisher import END_OF_REPLAY, EventsPublisher
from kvell.mempool.rendezvous import PageTransport
from kvell.serving.fronts import FrontListener
from kvell.wire.blocking import BlockingSocket
from kvell.wire.doorway import MOST_STRANGERS
from kvell.wire.endpoints import Endpoint, connect_to
from kvell.wire.frames import frame
from kvell.wire.greeting import Greeting
from kvell.wire.session import Purpose, open_session
from tests.mempool.pools import SECRET as POOL_SECRET
from tests.mempool.pools import pool_at
from tests.server.http.clients import running_server
from tests.wire.hostile import HOSTILE

SECRET = secrets.token_bytes(32)
PATIENCE_SECONDS = 30.0
MOST_OPEN = 40


@dataclass(frozen=True)
class Listener:
    """Something that listens.

    :ivar address: for :func:`connect_to`.
    :ivar meet: an honest peer comes; raises if it is not let in.
    :ivar most: connections that it hears at once.
    """

    address: Endpoint
    meet: Callable[[], object]
    most: int = MOST_STRANGERS

    def connected(self) -> socket.socket:
        sock = connect_to(self.address, PATIENCE_SECONDS)
        sock.settimeout(PATIENCE_SECONDS)
        return sock


def greeted(address: Endpoint, secret: bytes, purpose: Purpose) -> Listener:
    def meet() -> None:
        told = Greeting(f"honest-{secrets.token_hex(4)}", 1, "", 4096, port=1)
        with connect_to(address, PATIENCE_SECONDS) as sock:
            open_session(BlockingSocket(sock), told, secret, purpose)

    return Listener(address, meet)


@contextmanager
def pool(folder: Path, transport: PageTransport, purpose: Purpose) -> Iterator[Listener]:
    with pool_at(folder, "here", transport=transport) as opened:
        assert opened.address is not None
        yield greeted(opened.address, POOL_SECRET, purpose)


@contextmanager
def commands(_folder: Path) -> Iterator[Listener]:
    with FrontListener("127.0.0.1", SECRET, "decode-3", 1) as door:
        yield greeted(door.address, SECRET, "commands")


@contextmanager
def in_a_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextmanager
def fronts(_folder: Path) -> Iterator[Listener]:
    async def enters(_front: Greeting, sock: socket.socket) -> None:
        sock.close()

    async def opened() -> ManagerFrontListener:
        door.open()
        return door

    door = ManagerFrontListener("127.0.0.1", 0, Greeting("manager", 7, "", 0), SECRET, enters)
    with in_a_loop() as loop:
        asyncio.run_coroutine_threadsafe(opened(), loop).result()
        yield greeted(door.address, SECRET, "cluster")
        asyncio.run_coroutine_threadsafe(door.close(), loop).result()


@contextmanager
def http(folder: Path) -> Iterator[Listener]:
    with running_server(folder / "log", {"max_connections": MOST_OPEN}) as server:
        host, port = server.address

        def meet() -> None:
            body = {"model": "fake", "prompt": "hi", "max_tokens": 1}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS)
            assert answer.status_code == 200

        yield Listener(f"tcp://{host}:{port}", meet, MOST_OPEN)


@contextmanager
def replays(_folder: Path) -> Iterator[Listener]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    config = KvEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint=address)

    async def opened() -> EventsPublisher:
        return await EventsPublisher(config).__aenter__()

    def meet() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
            asker.linger = 0
            asker.rcvtimeo = int(1000 * PATIENCE_SECONDS)
            asker.connect(address)
            asker.send_multipart([b"", bytes(8)])
            assert asker.recv_multipart()[1] == END_OF_REPLAY

    with in_a_loop() as loop:
        publisher = asyncio.run_coroutine_threadsafe(opened(), loop).result()
        yield Listener(address, meet)
        ends: Any = publisher.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(ends, loop).result()


LISTENERS: dict[str, tuple[str, Callable[[Path], AbstractContextManager[Listener]]]] = {
    "pool": ("mempool/connections.py", lambda folder: pool(folder, "memory", "messages")),
    "pool over TCP": ("mempool/connections.py", lambda folder: pool(folder, "tcp", "messages")),
    "pages": ("mempool/connections.py", lambda folder: pool(folder, "tcp", "pages")),
    "commands": ("serving/fronts.py", commands),
    "fronts": ("fleet/manager/manager.py", fronts),
    "HTTP": ("server/run.py", http),
    "replays": ("front/events/publisher.py", replays),
}
"""By name: the module that begins to listen, and one that runs."""

SOURCES = Path(kvell.__file__).parent
LISTEN = ("listen", "create_server", "start_server", "create_unix_server", "bind")
MAKE = ("Doorway", "listen_at")
SHARED = {
    "wire/doorway.py": "takes a listener",
    "wire/endpoints.py": "makes listeners for doorways",
    "fleet/placing/ray/node_settings.py": "looks for a free port, and listens nowhere",
}
"""Modules that are tested through those that use them."""


def listening(tree: ast.Module) -> bool:
    """Whether a module begins to listen, or has a doorway made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in LISTEN:
                return True
            if isinstance(called, ast.Name) and called.id in MAKE:
                return True
    return False


def test_everything_that_listens_is_tested_here() -> None:
    found = {
        str(file.relative_to(SOURCES))
        for file in SOURCES.rglob("*.py")
        if listening(ast.parse(file.read_text()))
    }
    assert found - SHARED.keys() == {module for module, _ in LISTENERS.values()}


@pytest.fixture(scope="module", params=LISTENERS)
def listener(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Listener]:
    _, opens = LISTENERS[request.param]
    with opens(tmp_path_factory.mktemp("listener")) as opened:
        yield opened


def say(sock: socket.socket, words: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(words)
        sock.shutdown(socket.SHUT_WR)


def is_hung_up_on(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


NONSENSE = {
    "a frame that announces four billion bytes": struct.pack("<III", (1 << 32) - 1, 0, 0) * 8,
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "HTTP": b"GET /health HTTP/1.1\r\nX: \xff\r\nContent-Length: -1\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(237),
    "half a frame": frame(b"hello")[:-1],
    **{f"framed: {name}": frame(body) for name, body in HOSTILE.items()},
}


@pytest.mark.parametrize("words", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_hung_up_on(listener: Listener, words: bytes) -> None:
    with listener.connected() as sock:
        say(sock, words)
        assert is_hung_up_on(sock)
    listener.meet()


def resets(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize(
    "leaves", [socket.socket.close, resets, lambda sock: sock.shutdown(socket.SHUT_RD)]
)
def test_whoever_leaves_at_once_leaves_nothing(
    listener: Listener, leaves: Callable[[socket.socket], object]
) -> None:
    with ExitStack() as stack:
        for _ in range(listener.most + 8):
            leaves(stack.enter_context(listener.connected()))
        listener.meet()


@pytest.mark.parametrize("words", [b"", b"\0", frame(b"x" * 100)[:50]])
def test_more_silent_ones_than_are_heard_keep_nobody_out(listener: Listener, words: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(listener.most + 8):
            with contextlib.suppress(OSError):  # it made way already
                stack.enter_context(listener.connected()).sendall(words)
        listener.meet()
