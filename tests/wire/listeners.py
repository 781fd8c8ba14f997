"""Everything of the product that listens, and how an honest peer meets it."""

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import zmq

from kvell.fleet.manager.manager import ManagerFrontListener
from kvell.front.events.events_config import KvEventsConfig
from kvell.front.events.publisher import END_OF_REPLAY, EventsPublisher
from kvell.mempool.rendezvous import PageTransport
from kvell.serving.fronts import FrontListener
from kvell.wire.blocking import BlockingSocket
from kvell.wire.doorway import MOST_STRANGERS
from kvell.wire.endpoints import Endpoint, connect_to
from kvell.wire.greeting import Greeting
from kvell.wire.session import Purpose, open_session
from tests.mempool.pools import SECRET as POOL_SECRET
from tests.mempool.pools import pool_at
from tests.server.http.clients import running_server

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
