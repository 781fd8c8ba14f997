"""Where peers come in: listening, connecting, and finding out who is at the other end."""

import contextlib
import ipaddress
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from kvell.errors import ChangeSomething, TryLater
from kvell.frames import ProtocolError
from kvell.mempool.transports.endpoints import (
    Endpoint,
    connect_to,
    endpoint_of,
    keep,
    listen_at,
    tcp_endpoint,
)
from kvell.mempool.transports.greeting import GREETING_SECONDS, Greeting, exchange_descriptors
from kvell.mempool.transports.mapped import MappedPages
from kvell.mempool.transports.page_copies import Bytes
from kvell.mempool.transports.peer import Peer
from kvell.mempool.transports.rights import Rights
from kvell.mempool.transports.tcp.challenge import answer_session, check_secret, open_session
from kvell.mempool.transports.tcp.channel import Channel
from kvell.mempool.transports.tcp.page_server import PageServer
from kvell.mempool.transports.tcp.tcp_pages import TcpPages

GREETERS = 8
"""Strangers that are listened to at once."""
MOST_STRANGERS = 64
"""Connections that have not said who they are; further ones are closed at once."""


def listening(address: Endpoint | None, secret: bytes) -> socket.socket | None:
    """A socket that listens at an address; None for none.

    :raises ChangeSomething: when the address is none, cannot be bound, or the secret is too short
        for it.
    """
    if address is None:
        return None
    if isinstance(address, str):
        check_secret(secret)
    return listen_at(address)


class Door:
    """Lets in who knows the cluster's secret; the same for both transports.

    :param told: who this is.
    :param memory: own pool, uint8 [pool_bytes], and ``descriptor`` the memfd that it is.
    :param listener: of :func:`listening`.
    :param enters: gets each peer that has connected to it, on a thread of the door.
    """

    def __init__(
        self,
        told: Greeting,
        secret: bytes,
        memory: Bytes,
        descriptor: int,
        rights: Rights,
        listener: socket.socket | None,
        enters: Callable[[Peer], None],
    ) -> None:
        self._secret, self._enters = secret, enters
        self._descriptors = descriptor, rights.descriptor
        self.listener = listener
        self.address: Endpoint | None = None if listener is None else endpoint_of(listener)
        # Peers come back to the address that they see, so it is the one that listens.
        self._source, port = "", 0
        if listener is not None and listener.family != socket.AF_UNIX:
            host, port = listener.getsockname()[:2]
            self._source = "" if ipaddress.ip_address(host).is_unspecified else host
        self._told = msgspec.structs.replace(told, port=port)
        self._pages = PageServer(memory, rights)
        self._strangers: set[socket.socket] = set()
        self._greeters = ThreadPoolExecutor(GREETERS, thread_name_prefix="kvell-greeter")

    def connect(self, endpoint: Endpoint, name: str = "") -> Peer:
        """Connect to an instance; whoever calls waits.

        :param name: it must have; "": any.
        :raises TryLater: when nobody answers there.
        :raises ChangeSomething: when it is no instance of this cluster, or another.
        """
        if isinstance(endpoint, str):
            self._check_tcp()
        try:
            sock = connect_to(endpoint, GREETING_SECONDS, self._source)
        except OSError as error:
            raise TryLater(f"no instance answers at {endpoint} ({error})") from error
        try:
            peer = self._met(sock, endpoint)
            if name and peer.told.instance != name:
                peer.source.close()
                raise ProtocolError(f"{peer.told.instance} answers there, not {name}")
        except ProtocolError as error:
            sock.close()
            raise ChangeSomething("peer", endpoint, str(error), "give another address") from error
        except OSError as error:
            sock.close()
            raise TryLater(f"no instance answers at {endpoint} ({error})") from error
        return peer

    def accept(self) -> None:
        """Let somebody say who it is; whoever calls does not wait."""
        assert self.listener is not None
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return  # it hung up before
        if len(self._strangers) >= MOST_STRANGERS:
            sock.close()
            return
        self._strangers.add(sock)
        self._greeters.submit(self._accepted, sock)

    def close(self) -> None:
        """Let nobody in any more, and send nobody pages; nothing is read when this returns."""
        if self.listener is not None:
            self.listener.close()
        for sock in list(self._strangers):
            with contextlib.suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)
        self._greeters.shutdown()
        self._pages.close()

    def _check_tcp(self) -> None:
        if not self._told.port:
            raise ChangeSomething(
                "address",
                self.address,
                "is no TCP address, and a peer that connects over TCP fetches pages there",
                'give address="tcp://127.0.0.1:0"',
            )

    def _accepted(self, sock: socket.socket) -> None:
        try:
            peer = self._let_in(sock)
        except (OSError, ProtocolError):
            sock.close()
            return
        finally:
            self._strangers.discard(sock)
        if peer is None:
            return
        try:
            self._enters(peer)
        except TryLater:
            peer.close()

    def _let_in(self, sock: socket.socket) -> Peer | None:
        """Find out who connected; None if it only wants to read pages."""
        channel = Channel(sock)
        if sock.family == socket.AF_UNIX:
            _, told = answer_session(channel, self._told, self._secret, ("messages",))
            return self._on_this_host(sock, told)
        keep(sock)
        purpose, told = answer_session(channel, self._told, self._secret)
        if purpose == "pages":
            self._pages.serve(told.instance, channel)
            return None
        endpoint = tcp_endpoint(sock.getpeername()[0], told.port)
        return Peer(sock, told, TcpPages(partial(self._open_pages, endpoint, told)))

    def _met(self, sock: socket.socket, endpoint: Endpoint) -> Peer:
        """Say who this is and hear who answers."""
        told = open_session(Channel(sock), self._told, self._secret, "messages")
        if isinstance(endpoint, str):
            return Peer(sock, told, TcpPages(partial(self._open_pages, endpoint, told)))
        return self._on_this_host(sock, told)

    def _on_this_host(self, sock: socket.socket, told: Greeting) -> Peer:
        """A peer that has proved to know the secret: each maps the other's memory."""
        descriptors = exchange_descriptors(sock, self._descriptors, GREETING_SECONDS)
        return Peer(sock, told, MappedPages(told.pool_bytes, descriptors))

    def _open_pages(self, endpoint: str, told: Greeting) -> Channel:
        """A connection for pages of a peer."""
        channel = Channel(connect_to(endpoint, GREETING_SECONDS, self._source))
        try:
            found = open_session(channel, self._told, self._secret, "pages")
            if (found.instance, found.incarnation) != (told.instance, told.incarnation):
                raise ProtocolError("another instance answers in its place")
        except BaseException:
            channel.close()
            raise
        return channel
