"""Connections of an instance to others, opened or accepted."""

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
from kvell.mempool.transports.tcp.partials import Answers, PartialsLine, PartialsServer
from kvell.mempool.transports.tcp.served_peers import ServedPeers
from kvell.mempool.transports.tcp.tcp_pages import PageServer, TcpPages
from kvell.wire.blocking import BlockingSocket
from kvell.wire.descriptors import exchange_descriptors
from kvell.wire.doorway import Doorway, Enters
from kvell.wire.endpoints import Endpoint, connect_to, listen_at, tcp_endpoint
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import GREETING_SECONDS, Greeting
from kvell.wire.session import Purpose, check_secret, open_session

logger = logging.getLogger(__name__)
TAKERS = 8
"""The threads that set up authenticated peers. Each may wait for the node or for descriptors."""


def listening(address: Endpoint | None, secret: bytes) -> socket.socket | None:
    """Return a socket that listens at an address, or None without an address.

    :raises ChangeSomething: when the address is invalid or cannot be bound, or the secret is too
        short for TCP.
    """
    if address is None:
        return None
    if isinstance(address, str):
        check_secret(secret)
    return listen_at(address)


class PeerConnections:
    """The connections to other instances of the cluster, the same for both transports.

    :param memory: the pool, uint8 [pool_bytes]; ``descriptor`` is its memfd.
    :param enters: receives each peer that has connected here, on a separate thread.
    :param answers: computes attention over lent pages for queries over TCP; None: no queries.
    """

    def __init__(
        self,
        greeting: Greeting,
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
        # Peers connect back to the address that they see, so connections start from the listener's.
        self._source, port = "", 0
        is_tcp = listener is not None and listener.family != socket.AF_UNIX
        if listener is not None and is_tcp:
            host, port = listener.getsockname()[:2]
            self._source = "" if ipaddress.ip_address(host).is_unspecified else host
        self._told = msgspec.structs.replace(greeting, port=port)
        self.page_server = PageServer(memory, rights)
        self._partials = None if answers is None else PartialsServer(answers)
        self._taken: set[socket.socket] = set()
        self._takers = ThreadPoolExecutor(TAKERS, thread_name_prefix="kvell-taker")
        purposes: dict[Purpose, Enters] = {"messages": self._came}
        if is_tcp:
            purposes["pages"] = _answers(self.page_server)
        if is_tcp and self._partials is not None:
            purposes["partials"] = _answers(self._partials)
        self.doorway = None if listener is None else Doorway(listener, self._told, secret, purposes)

    @property
    def address(self) -> Endpoint | None:
        return None if self.doorway is None else self.doorway.address

    def open(self) -> None:
        if self.doorway is not None:
            self.doorway.open()

    def connect(self, endpoint: Endpoint, name: str = "") -> Peer:
        """Connect to an instance and wait for the connection.

        :param name: the required name of the instance; "": any.
        :raises TryLater: when no instance answers there.
        :raises ChangeSomething: when the peer is of another cluster, or has another name.
        """
        if isinstance(endpoint, str) and not self._told.port:
            raise ChangeSomething(
                "address",
                self.address,
                "is not a TCP address, and a peer that connects over TCP fetches pages there",
                'give address="tcp://127.0.0.1:0"',
            )
        try:
            sock = connect_to(endpoint, GREETING_SECONDS, self._source)
        except OSError as error:
            raise TryLater(f"no instance answers at {endpoint} ({error})") from error
        try:
            peer = open_session(BlockingSocket(sock), self._told, self._secret, "messages")
            if name and peer.instance != name:
                raise ProtocolError(f"{peer.instance} answers there, not {name}")
            return self._peer(sock, peer, endpoint)
        except ProtocolError as error:
            sock.close()
            raise ChangeSomething("peer", endpoint, str(error), "give another address") from error
        except OSError as error:
            sock.close()
            raise TryLater(f"no instance answers at {endpoint} ({error})") from error

    def close(self) -> None:
        """Stop accepting peers and serving pages. No page is read once this returns."""
        if self.doorway is not None:
            self.doorway.close()
        for sock in list(self._taken):
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)
        self._takers.shutdown()
        self.page_server.close()
        if self._partials is not None:
            self._partials.close()

    def _came(self, greeting: Greeting, sock: socket.socket) -> None:
        self._taken.add(sock)
        self._takers.submit(self._take, greeting, sock)

    def _take(self, greeting: Greeting, sock: socket.socket) -> None:
        try:
            is_here = sock.family == socket.AF_UNIX
            host = "" if is_here else sock.getpeername()[0]
            peer = self._peer(
                sock, greeting, None if is_here else tcp_endpoint(host, greeting.port)
            )
        except (OSError, ProtocolError):
            sock.close()
            return
        except Exception:
            logger.exception("%s, which has connected, could not be set up", greeting.instance)
            sock.close()
            return
        finally:
            self._taken.discard(sock)
        try:
            self._enters(peer)
        except TryLater:
            peer.close()
        except Exception:
            logger.exception("%s, which has connected, could not be set up", greeting.instance)
            peer.close()

    def _peer(self, sock: socket.socket, greeting: Greeting, endpoint: Endpoint | None) -> Peer:
        """Return an authenticated peer.

        :param endpoint: the TCP address for reading its pages; otherwise both sides map memory.
        """
        if isinstance(endpoint, str):
            pages = TcpPages(partial(self._open, "pages", endpoint, greeting))
            asks = partial(self._open, "partials", endpoint, greeting)
            partials = None if self._partials is None else PartialsLine(asks)
            return Peer(sock, greeting, pages, partials)
        descriptors = exchange_descriptors(sock, self._descriptors, GREETING_SECONDS)
        return Peer(sock, greeting, MappedPages(greeting.pool_bytes, descriptors))

    def _open(self, purpose: Purpose, endpoint: str, peer: Greeting) -> BlockingSocket:
        """Return a connection for pages of a peer, or for attention over them."""
        channel = BlockingSocket(connect_to(endpoint, GREETING_SECONDS, self._source))
        try:
            answer = open_session(channel, self._told, self._secret, purpose)
            if (answer.instance, answer.incarnation) != (peer.instance, peer.incarnation):
                raise ProtocolError("another instance answers in its place")
        except BaseException:
            channel.close()
            raise
        return channel


def _answers(server: ServedPeers) -> Enters:
    return lambda greeting, sock: server.answer_peer(greeting.instance, BlockingSocket(sock))
