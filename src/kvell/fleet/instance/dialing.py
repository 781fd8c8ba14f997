"""Connections to instances that listen for their fronts and their manager."""

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
    """A line that also tells the instance that its front lives, until it ends."""

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
    address: str, told: Greeting, secret: bytes, purpose: Purpose
) -> tuple[socket.socket, Greeting]:
    """Connect, and prove to each other that both know the secret.

    It takes no thread, so that processes that do not answer hold up nothing else.

    :param address: like ``tcp://10.0.0.1:5000``.
    :param told: who this is.
    :returns: a connection that does not block, and who answered.
    :raises OSError: when nobody answers there in time.
    :raises ProtocolError: when the answering process does not belong to this cluster.
    :raises ChangeSomething: when it runs another release, or the address is none.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(GREETING_SECONDS):
        sock = await connected_to(address)
        try:
            opening = Opening(told, secret, purpose)
            said = opening.hello
            while True:
                await loop.sock_sendall(sock, said)
                if opening.met is not None:
                    return sock, opening.met
                heard = await loop.sock_recv(sock, opening.wanted_bytes)
                if not heard:
                    raise ProtocolError("the peer hung up")
                said = opening.hear(heard)
        except BaseException:
            sock.close()
            raise


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
