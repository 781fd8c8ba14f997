"""The manager's listener for fronts, which passes their connections to the event loop."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from kvell.wire.doorway import Doorway
from kvell.wire.endpoints import listen_at, tcp_endpoint
from kvell.wire.greeting import Greeting
from kvell.wire.session import check_secret

logger = logging.getLogger(__name__)


class ManagerFrontListener:
    """A listener for the fronts of this cluster, from :meth:`open` to :meth:`close`.

    :param greeting: of the manager.  A front with other settings has another ``fingerprint``: it
        receives this greeting, and is disconnected.
    :param secret: of the cluster.
    :param enters: receives each front's greeting and its non-blocking connection.
    :raises ChangeSomething: when the address cannot be bound, or the secret is too short.
    :ivar address: where it listens once it is made, like ``tcp://10.0.0.1:5000``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        greeting: Greeting,
        secret: bytes,
        enters: Callable[[Greeting, socket.socket], Awaitable[None]],
    ) -> None:
        check_secret(secret)
        self._told, self._enters = greeting, enters
        listener = listen_at(tcp_endpoint(host, port))
        self._doorway = Doorway(listener, greeting, secret, {"cluster": self._came})
        self.address = str(self._doorway.address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entering: set[asyncio.Future[None]] = set()

    @property
    def strangers(self) -> int:
        return self._doorway.strangers

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._doorway.open()

    async def close(self) -> None:
        self._loop = None
        await asyncio.to_thread(self._doorway.close)
        if self._entering:
            await asyncio.wait(self._entering)

    def _came(self, front: Greeting, sock: socket.socket) -> None:
        """Pass a front on to the event loop; runs on the doorway's thread."""
        loop = self._loop
        if loop is None:
            sock.close()
        else:
            loop.call_soon_threadsafe(self._take, front, sock)

    def _take(self, front: Greeting, sock: socket.socket) -> None:
        if self._loop is None:
            sock.close()
            return
        if front.fingerprint != self._told.fingerprint:
            logger.warning("front %s has other settings; it was disconnected", front.instance)
            sock.close()
            return
        entering = asyncio.ensure_future(self._enters(front, sock))
        self._entering.add(entering)
        entering.add_done_callback(self._entering.discard)
