"""Connections to processes that listen for the fronts and the manager of their cluster."""

import asyncio
import socket

from typing_extensions import override

from kvell.engine.protocol.messages import KEEP_ALIVE_SECONDS, KeepAlive
from kvell.fleet.instance.instance_line import InstanceLine
from kvell.wire.endpoints import connected_to
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import GREETING_SECONDS, Greeting
from kvell.wire.session import Opening, Purpose


class DialedLine(InstanceLine):
    """A line that also sends keep-alives to the instance, until the line ends."""

    _timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._keep_alive()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _keep_alive(self) -> None:
        self.send(KeepAlive())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(KEEP_ALIVE_SECONDS, self._keep_alive)


async def dial(
    address: str, greeting: Greeting, secret: bytes, purpose: Purpose
) -> tuple[socket.socket, Greeting]:
    """Connect to a process of the cluster; both sides prove that they have the secret.

    No thread is used, so processes that do not answer block nothing else.

    :param address: like ``tcp://10.0.0.1:5000``.
    :returns: a non-blocking connection, and the identity of the peer.
    :raises OSError: when no process answers there in time.
    :raises ProtocolError: when the peer does not belong to this cluster.
    :raises ChangeSomething: when the peer runs another release, or the address is invalid.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(GREETING_SECONDS):
        sock = await connected_to(address)
        try:
            opening = Opening(greeting, secret, purpose)
            message = opening.hello
            while True:
                await loop.sock_sendall(sock, message)
                if opening.met is not None:
                    return sock, opening.met
                received = await loop.sock_recv(sock, opening.wanted_bytes)
                if not received:
                    raise ProtocolError("the peer closed the connection")
                message = opening.hear(received)
        except BaseException:
            sock.close()
            raise


async def dial_instance(
    address: str, greeting: Greeting, secret: bytes, instance: str, incarnation: int
) -> DialedLine:
    """Return a line to an incarnation of an instance, which listens at the address.

    :raises OSError: when no process answers there in time.
    :raises ProtocolError: when another instance or incarnation answers.
    """
    sock, peer = await dial(address, greeting, secret, "commands")
    if (peer.instance, peer.incarnation) != (instance, incarnation):
        sock.close()
        raise ProtocolError(f"another instance answers at {address}: {peer.instance}")
    loop = asyncio.get_running_loop()
    _, line = await loop.create_connection(DialedLine, sock=sock)
    return line
