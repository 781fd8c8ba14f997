"""Connections to instances that listen for their fronts and their manager."""

import asyncio
import socket

from kvell.engine.protocol.messages import KEEP_ALIVE_SECONDS, KeepAlive
from kvell.fleet.instance.instance_line import InstanceLine
from kvell.wire.blocking import BlockingSocket
from kvell.wire.endpoints import connect_to
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import GREETING_SECONDS, Greeting
from kvell.wire.session import Purpose, open_session


class DialedLine(InstanceLine):
    """A line that also tells the instance that its front lives, until it ends."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        super().connection_made(transport)
        self._keep_alive()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _keep_alive(self) -> None:
        self.send(KeepAlive())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(KEEP_ALIVE_SECONDS, self._keep_alive)


async def dial(
    address: str, told: Greeting, secret: bytes, purpose: Purpose
) -> tuple[socket.socket, Greeting]:
    """Connect, and prove to each other that both know the secret.

    :param address: like ``tcp://10.0.0.1:5000``.
    :param told: who this is.
    :returns: a connection that does not block, and who answered.
    :raises OSError: when nobody answers there in time.
    :raises ProtocolError: when whoever answers does not belong to this cluster.
    """
    return await asyncio.to_thread(_met, address, told, secret, purpose)


async def dial_instance(
    address: str, told: Greeting, secret: bytes, instance: str, incarnation: int
) -> DialedLine:
    """The line to an incarnation of an instance, at the address that it listens at.

    :raises OSError: when nobody answers there in time.
    :raises ProtocolError: when another answers.
    """
    sock, heard = await dial(address, told, secret, "commands")
    if (heard.instance, heard.incarnation) != (instance, incarnation):
        sock.close()
        raise ProtocolError(f"another instance answers at {address}: {heard.instance}")
    loop = asyncio.get_running_loop()
    _, line = await loop.create_connection(DialedLine, sock=sock)
    return line


def _met(
    address: str, told: Greeting, secret: bytes, purpose: Purpose
) -> tuple[socket.socket, Greeting]:
    sock = connect_to(address, GREETING_SECONDS)
    try:
        heard = open_session(BlockingSocket(sock), told, secret, purpose)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock, heard
