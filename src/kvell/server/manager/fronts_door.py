"""Where fronts come in: the manager listens, and both sides prove that they know the secret.

Whoever says nothing is hung up on after ``GREETING_SECONDS``, and only so many are heard at once.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from kvell.frames import ProtocolError
from kvell.mempool.door import GREETERS, MOST_STRANGERS
from kvell.mempool.transports.endpoints import endpoint_of, keep, listen_at, tcp_endpoint
from kvell.mempool.transports.greeting import Greeting
from kvell.mempool.transports.tcp.challenge import answer_session, check_secret
from kvell.mempool.transports.tcp.channel import Channel

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.05
"""After a connection that could not be accepted."""


class FrontsDoor:
    """Lets in the fronts of this cluster; from :meth:`open` to :meth:`close`.

    :param told: who this is.  A front made with other settings has another ``fingerprint``: it
        hears this one, and is hung up on.
    :param secret: of the cluster.
    :param enters: gets each front's name and its connection, which does not block.
    :raises ChangeSomething: when the address cannot be bound, or the secret is too short.
    :ivar address: where it listens from now on, like ``tcp://10.0.0.1:5000``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        told: Greeting,
        secret: bytes,
        enters: Callable[[str, socket.socket], Awaitable[None]],
    ) -> None:
        check_secret(secret)
        self._told, self._secret, self._enters = told, secret, enters
        self._listener = listen_at(tcp_endpoint(host, port))
        self.address = str(endpoint_of(self._listener))
        self._strangers: set[socket.socket] = set()
        self._greeting: set[asyncio.Task[None]] = set()
        self._greeters = ThreadPoolExecutor(GREETERS, thread_name_prefix="kvell-fronts-door")
        self._accepting: asyncio.Task[None] | None = None

    @property
    def strangers(self) -> int:
        """Connections that have not proved yet who they are."""
        return len(self._strangers)

    def open(self) -> None:
        """Begin to let fronts in."""
        self._accepting = asyncio.create_task(self._accept())

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
        if heard.fingerprint != self._told.fingerprint:
            logger.warning("front %s has other settings; it was hung up on", heard.instance)
            sock.close()
            return
        sock.setblocking(False)
        await self._enters(heard.instance, sock)

    def _met(self, sock: socket.socket) -> Greeting:
        """Who it is; in a thread."""
        keep(sock)
        _, heard = answer_session(Channel(sock), self._told, self._secret, ("cluster",))
        return heard
