"""Where fronts come in to the manager: a doorway, whose arrivals reach the event loop."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from kvell.wire.doorway import Doorway
from kvell.wire.endpoints import listen_at, tcp_endpoint
from kvell.wire.greeting import Greeting
from kvell.wire.session import check_secret

logger = logging.getLogger(__name__)


class FrontsDoor:
    """Lets in the fronts of this cluster; from :meth:`open` to :meth:`close`.

    :param told: who this is.  A front made with other settings has another ``fingerprint``: it
        hears this one, and is hung up on.
    :param secret: of the cluster.
    :param enters: gets each front and its connection, which does not block.
    :raises ChangeSomething: when the address cannot be bound, or the secret is too short.
    :ivar address: where it listens from now on, like ``tcp://10.0.0.1:5000``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        told: Greeting,
        secret: bytes,
        enters: Callable[[Greeting, socket.socket], Awaitable[None]],
    ) -> None:
        check_secret(secret)
        self._told, self._enters = told, enters
        listener = listen_at(tcp_endpoint(host, port))
        self._doorway = Doorway(listener, told, secret, {"cluster": self._came})
        self.address = str(self._doorway.address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entering: set[asyncio.Future[None]] = set()

    @property
    def strangers(self) -> int:
        """Connections that have not proved yet who they are."""
        return self._doorway.strangers

    def open(self) -> None:
        """Begin to let fronts in."""
        self._loop = asyncio.get_running_loop()
        self._doorway.open()

    async def close(self) -> None:
        """Let nobody in any more."""
        self._loop = None
        await asyncio.to_thread(self._doorway.close)
        if self._entering:
            await asyncio.wait(self._entering)

    def _came(self, heard: Greeting, sock: socket.socket) -> None:
        """A front is there; on the doorway's thread."""
        loop = self._loop
        if loop is None:
            sock.close()
        else:
            loop.call_soon_threadsafe(self._take, heard, sock)

    def _take(self, heard: Greeting, sock: socket.socket) -> None:
        if self._loop is None:
            sock.close()
            return
        if heard.fingerprint != self._told.fingerprint:
            logger.warning("front %s has other settings; it was hung up on", heard.instance)
            sock.close()
            return
        entering = asyncio.ensure_future(self._enters(heard, sock))
        self._entering.add(entering)
        entering.add_done_callback(self._entering.discard)
