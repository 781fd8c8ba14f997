"""Where instances of other machines come in: the front listens, and both sides prove themselves.

::

    instance                                      front
      │ ── connects, proves the secret ─────────►   │  who is it; is it expected
      │ ◄── proves the secret ───────────────────   │
      │ ◄─────── the instance protocol ──────────►  │  the same frames as on one host

Whoever says nothing is hung up on after ``GREETING_SECONDS``, and only so many are heard at once.
"""

import asyncio
import contextlib
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

from kvell.frames import ProtocolError
from kvell.mempool.door import GREETERS, MOST_STRANGERS
from kvell.mempool.transports.endpoints import endpoint_of, keep, listen_at
from kvell.mempool.transports.greeting import Greeting
from kvell.mempool.transports.tcp.challenge import answer_session, check_secret
from kvell.mempool.transports.tcp.channel import Channel

FRONT = "front"
"""The front's name in its greeting; instances are named by role and number."""
INCARNATION_BITS = 48
PAUSE_SECONDS = 0.05
"""After a connection that could not be accepted."""

Awaited = tuple[str, int]
"""Name and incarnation of an instance."""


class Entrance:
    """Lets in the incarnations that are expected, each once; from :meth:`open` to :meth:`close`.

    :param host: address to listen on, which instances are told.
    :param secret: of the cluster.
    :raises ChangeSomething: when the address cannot be bound.
    """

    def __init__(self, host: str, secret: bytes, port: int = 0) -> None:
        check_secret(secret)
        self._secret = secret
        self._told = Greeting(FRONT, secrets.randbits(INCARNATION_BITS), "", 0)
        written = f"[{host}]" if ":" in host else host
        self._listener = listen_at(f"tcp://{written}:{port}")
        self.address = str(endpoint_of(self._listener))
        self._expected: dict[Awaited, asyncio.Future[socket.socket]] = {}
        self._strangers: set[socket.socket] = set()
        self._greeting: set[asyncio.Task[None]] = set()
        self._greeters = ThreadPoolExecutor(GREETERS, thread_name_prefix="kvell-entrance")
        self._accepting: asyncio.Task[None] | None = None

    @property
    def strangers(self) -> int:
        """Connections that have not proved yet who they are."""
        return len(self._strangers)

    def open(self) -> None:
        """Begin to let instances in; in the loop that :meth:`expect` is called from."""
        self._accepting = asyncio.create_task(self._accept())

    def expect(self, instance: str, incarnation: int) -> "asyncio.Future[socket.socket]":
        """The connection of an incarnation, once it has proved itself; cancelled: not any more."""
        awaited = instance, incarnation
        arrives: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._expected[awaited] = arrives
        arrives.add_done_callback(lambda _: self._expected.pop(awaited, None))
        return arrives

    async def close(self) -> None:
        """Let nobody in any more."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        self._listener.close()
        for sock in self._strangers:
            with contextlib.suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)
        if self._greeting:
            await asyncio.wait(self._greeting)
        self._greeters.shutdown()
        for arrives in list(self._expected.values()):
            arrives.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(PAUSE_SECONDS)  # it hung up, or there are no descriptors
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                sock.close()
                continue
            self._strangers.add(sock)
            greeting = asyncio.create_task(self._let_in(sock))
            self._greeting.add(greeting)
            greeting.add_done_callback(self._greeting.discard)

    async def _let_in(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            heard = await loop.run_in_executor(self._greeters, self._met, sock)
        except (OSError, ProtocolError):
            sock.close()
            return
        finally:
            self._strangers.discard(sock)
        arrives = self._expected.get((heard.instance, heard.incarnation))
        if arrives is None or arrives.done():  # given up, or of a front before
            sock.close()
            return
        sock.setblocking(False)
        arrives.set_result(sock)

    def _met(self, sock: socket.socket) -> Greeting:
        """Who it is; in a thread."""
        keep(sock)
        _, heard = answer_session(Channel(sock), self._told, self._secret, ("commands",))
        return heard
