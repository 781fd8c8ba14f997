"""Connections of an instance to others: those that it opens, and those that it lets in."""

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from kvell.errors import ChangeSomething, TryLater
from kvell.mempool.transports.mapped import MappedPages
from kvell.mempool.transports.page_copies import Bytes
from kvell.mempool.transports.peer import Peer
from kvell.mempool.transports.rights import Rights
from kvell.mempool.transports.tcp.page_server import PageServer
from kvell.mempool.transports.tcp.partials import Answers, PartialsLine, PartialsServer
from kvell.mempool.transports.tcp.tcp_pages import TcpPages
from kvell.wire.blocking import BlockingSocket
from kvell.wire.descriptors import exchange_descriptors
from kvell.wire.doorway import Doorway, Enters
from kvell.wire.endpoints import Endpoint, connect_to, listen_at, tcp_endpoint
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import GREETING_SECONDS, Greeting
from kvell.wire.session import Purpose, check_secret, open_session

logger = logging.getLogger(__name__)
TAKERS = 8
"""Threads that take in proven peers: each waits for the node, or for descriptors."""


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


class PeerConnections:
    """Meets other instances of the cluster; the same for both transports.

    :param told: who this is.
    :param memory: own pool, uint8 [pool_bytes], and ``descriptor`` the memfd that it is.
    :param listener: of :func:`listening`.
    :param enters: gets each peer that has connected to it, on a thread of its own.
    :param answers: answers queries over lent pages that come over TCP; None: nobody asks any here.
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
        answers: Answers | None = None,
    ) -> None:
        self._secret, self._enters = secret, enters
        self._descriptors = descriptor, rights.descriptor
        # Peers come back to the address that they see, so it is the one that listens.
        self._source, port = "", 0
        is_tcp = listener is not None and listener.family != socket.AF_UNIX
        if listener is not None and is_tcp:
            host, port = listener.getsockname()[:2]
            self._source = "" if ipaddress.ip_address(host).is_unspecified else host
        self._told = msgspec.structs.replace(told, port=port)
        self._pages = PageServer(memory, rights)
        self._partials = None if answers is None else PartialsServer(answers)
        self._taken: set[socket.socket] = set()
        self._takers = ThreadPoolExecutor(TAKERS, thread_name_prefix="kvell-taker")
        purposes: dict[Purpose, Enters] = {"messages": self._came}
        if is_tcp:
            purposes["pages"] = self._reads
        if is_tcp and self._partials is not None:
            purposes["partials"] = self._asks
        self.doorway = None if listener is None else Doorway(listener, self._told, secret, purposes)

    @property
    def address(self) -> Endpoint | None:
        """Where it listens."""
        return None if self.doorway is None else self.doorway.address

    def open(self) -> None:
        """Begin to let others in."""
        if self.doorway is not None:
            self.doorway.open()

    def connect(self, endpoint: Endpoint, name: str = "") -> Peer:
        """Connect to an instance; the caller waits.

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
            told = open_session(BlockingSocket(sock), self._told, self._secret, "messages")
            if name and told.instance != name:
                raise ProtocolError(f"{told.instance} answers there, not {name}")
            return self._peer(sock, told, endpoint)
        except ProtocolError as error:
            sock.close()
            raise ChangeSomething("peer", endpoint, str(error), "give another address") from error
        except OSError as error:
            sock.close()
            raise TryLater(f"no instance answers at {endpoint} ({error})") from error

    def close(self) -> None:
        """Let nobody in any more, and send nobody pages; nothing is read when this returns."""
        if self.doorway is not None:
            self.doorway.close()
        for sock in list(self._taken):
            with contextlib.suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)
        self._takers.shutdown()
        self._pages.close()
        if self._partials is not None:
            self._partials.close()

    def _check_tcp(self) -> None:
        if not self._told.port:
            raise ChangeSomething(
                "address",
                self.address,
                "is no TCP address, and a peer that connects over TCP fetches pages there",
                'give address="tcp://127.0.0.1:0"',
            )

    def _came(self, told: Greeting, sock: socket.socket) -> None:
        """An instance has connected."""
        self._taken.add(sock)
        self._takers.submit(self._take, told, sock)

    def _reads(self, told: Greeting, sock: socket.socket) -> None:
        """An instance has connected to read pages."""
        self._pages.serve(told.instance, BlockingSocket(sock))

    def _asks(self, told: Greeting, sock: socket.socket) -> None:
        """An instance has connected to ask for attention over what it borrows."""
        if self._partials is not None:
            self._partials.answer_peer(told.instance, BlockingSocket(sock))

    def _take(self, told: Greeting, sock: socket.socket) -> None:
        try:
            is_here = sock.family == socket.AF_UNIX
            host = "" if is_here else sock.getpeername()[0]
            peer = self._peer(sock, told, None if is_here else tcp_endpoint(host, told.port))
        except (OSError, ProtocolError):
            sock.close()
            return
        except Exception:
            logger.exception("%s, which has connected, could not be taken in", told.instance)
            sock.close()
            return
        finally:
            self._taken.discard(sock)
        try:
            self._enters(peer)
        except TryLater:
            peer.close()
        except Exception:
            logger.exception("%s, which has connected, could not be taken in", told.instance)
            peer.close()

    def _peer(self, sock: socket.socket, told: Greeting, endpoint: Endpoint | None) -> Peer:
        """A peer that has proved to know the secret.

        :param endpoint: at which its pages are read over TCP; else both map the other's memory.
        """
        if isinstance(endpoint, str):
            pages = TcpPages(partial(self._open, "pages", endpoint, told))
            asks = partial(self._open, "partials", endpoint, told)
            partials = None if self._partials is None else PartialsLine(asks)
            return Peer(sock, told, pages, partials)
        descriptors = exchange_descriptors(sock, self._descriptors, GREETING_SECONDS)
        return Peer(sock, told, MappedPages(told.pool_bytes, descriptors))

    def _open(self, purpose: Purpose, endpoint: str, told: Greeting) -> BlockingSocket:
        """A connection for pages of a peer, or for attention over them."""
        channel = BlockingSocket(connect_to(endpoint, GREETING_SECONDS, self._source))
        try:
            found = open_session(channel, self._told, self._secret, purpose)
            if (found.instance, found.incarnation) != (told.instance, told.incarnation):
                raise ProtocolError("another instance answers in its place")
        except BaseException:
            channel.close()
            raise
        return channel
