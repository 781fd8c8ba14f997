"""The I/O of one instance's part in the pool: sockets, time and copies, on a separate thread.

``PageTransferThread`` passes events to the owner of the agent: a library's agent answers on this
thread, an engine's between two steps.
"""

import contextlib
import logging
import queue
import selectors
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from kvell.clock import Clock, MonotonicClock
from kvell.errors import ChangeSomething, TryLater
from kvell.memory import GroupSpec
from kvell.mempool.connections import PeerConnections, listening
from kvell.mempool.entries import (
    BY_QUERIES,
    NOT_IN_PLACE,
    Heard,
    PeerEntry,
    PeerLost,
    PeerMapped,
    PullEnded,
    Ticked,
)
from kvell.mempool.owners import TICK_MILLISECONDS, Tick
from kvell.mempool.transfers.actions import (
    Action,
    Arrived,
    Ended,
    Fetched,
    Grant,
    Pull,
    PullRest,
    Revoke,
    RoomGranted,
    Send,
    StopPull,
)
from kvell.mempool.transfers.messages import Transfer, Written
from kvell.mempool.transports.lent_attention import LentAttention, RightsWords
from kvell.mempool.transports.mapped import MappedPages
from kvell.mempool.transports.mover import PullExecutor
from kvell.mempool.transports.neighbours import MappedPeers
from kvell.mempool.transports.page_copies import Bytes, pieces_of
from kvell.mempool.transports.peer import Peer
from kvell.mempool.transports.rights import Rights
from kvell.mempool.transports.tcp.partials import PartialsLine
from kvell.wire.bell import Bell
from kvell.wire.buffered import PeerClosedError
from kvell.wire.endpoints import Endpoint
from kvell.wire.greeting import Greeting

THREADS = 4


class PeerFinder:
    """The messages that wait for a connection, and the threads that connect.

    :param find: returns the address of an instance by its name.
    :param connect: connects to an instance; called on a thread of the finder, as is ``fail``.
    :param fail: called when an instance cannot be reached.
    """

    def __init__(
        self,
        find: Callable[[str], Endpoint],
        connect: Callable[[Endpoint, str], object],
        fail: Callable[[str], None],
    ) -> None:
        self._find, self._connect, self._fail = find, connect, fail
        self._waiting: dict[str, list[Send]] = {}
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvell-reacher")

    def reach(self, action: Send) -> None:
        name = action.instance
        is_new = name not in self._waiting
        self._waiting.setdefault(name, []).append(action)
        if is_new:
            self.threads.submit(self._reach, name)

    def take(self, name: str) -> Sequence[Send]:
        return self._waiting.pop(name, ())

    def _reach(self, name: str) -> None:
        try:
            self._connect(self._find(name), name)
        except (ChangeSomething, TryLater, OSError):
            self._fail(name)


Incarnation = tuple[str, int]


class Creditors:
    """The peers that may lend to one instance.

    :param neighbours: maps pools of peers on this host after this pool.
    :param fingerprint: the fingerprint of this layout; peers with another one lend no pages.
    """

    def __init__(self, neighbours: MappedPeers | None, fingerprint: str) -> None:
        self._neighbours, self._fingerprint = neighbours, fingerprint
        self._in_place: dict[Incarnation, list[MappedPages]] = {}
        self._asked: dict[Incarnation, PartialsLine] = {}

    def meet(self, peer: Peer) -> int | None:
        """Let attention read the pages that a peer will lend.

        :returns: ``first_large`` of :class:`.PeerMapped`; None if the peer lends no pages here.
        """
        greeting, source = peer.greeting, peer.source
        if self._neighbours is None or greeting.fingerprint != self._fingerprint:
            return None
        key = greeting.instance, greeting.incarnation
        if isinstance(source, MappedPages):
            self._in_place.setdefault(key, []).append(source)
            return source.put_behind(self._neighbours)
        if peer.partials is None:
            return NOT_IN_PLACE
        self._asked[key] = peer.partials
        return BY_QUERIES

    def stands(self, instance: str, incarnation: int, number: int) -> bool:
        """Return whether a right to read in place is still valid. Any thread may call this."""
        met = self._in_place.get((instance, incarnation))
        return met[0].rights.stands(number) if met else False

    def partials(self, instance: str, incarnation: int) -> PartialsLine | None:
        """Return the line for queries to an instance, if any. Any thread may call this."""
        return self._asked.get((instance, incarnation))

    def take_away(self, instance: str, incarnation: int) -> None:
        """Forget the pool of a dead instance once no step reads it. Any thread may call this."""
        met = self._in_place.get((instance, incarnation))  # it may be connected again already
        if met:
            met.pop(0).take_away()
        line = self._asked.get((instance, incarnation))
        if line is not None and line.is_closed:
            del self._asked[instance, incarnation]


logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
News = Arrived | Ended | Fetched | RoomGranted
LONGEST_PAUSE_SECONDS = 60.0


class PageTransferThread:
    """The I/O thread of an agent, which runs from :meth:`start` to :meth:`close`.

    ``tells`` receives news on the node's thread, in order with the executed actions.

    :param handle: handles events on the node's thread and returns actions to execute immediately.
    :param memory: the pool and the CPU buffer after it, if there is one, uint8 [bytes];
        ``descriptor`` is their memfd.
    :param address: the address to listen at; None: peers cannot connect.
    :param finds: returns the address of an instance that is not connected yet, by its name; None:
        only connected instances can be reached.
    :param neighbours: the mappings of peers' pools on this host after this pool; None: pages of
        peers are not read in place.
    :param lends: makes the kernel for attention over lent pages for peers over TCP, given the table
        of rights; None: no such attention.
    """

    def __init__(
        self,
        instance: str,
        incarnation: int,
        fingerprint: str,
        handle: Callable[[PeerEntry], Sequence[Action]],
        groups: Sequence[GroupSpec],
        memory: Bytes,
        descriptor: int,
        *,
        address: Endpoint | None = None,
        finds: Callable[[str], Endpoint] | None = None,
        secret: bytes = b"",
        tells: Callable[[News], None] = lambda _: None,
        clock: Clock | None = None,
        neighbours: MappedPeers | None = None,
        lends: Callable[[RightsWords], LentAttention] | None = None,
    ) -> None:
        listener = listening(address, secret)
        self.instance, self._handle = instance, handle
        self._deadline: Tick | None = None
        self._clock = clock or MonotonicClock()
        self._tells, self._groups = tells, groups
        self.rights = Rights()
        self._lent = None if lends is None else lends(self.rights.words)
        greeting = Greeting(instance, incarnation, fingerprint, len(memory))
        self.connections = PeerConnections(
            greeting,
            secret,
            memory,
            descriptor,
            self.rights,
            listener,
            lambda peer: self.ask(lambda: self._enter(peer)),
            None if self._lent is None else self._lent.answer,
        )
        self.mover = PullExecutor(groups, memory, self._pull_ended)
        self.creditors = Creditors(neighbours, fingerprint)
        self.connected: dict[str, Peer] = {}
        self._beside: dict[str, list[Peer]] = {}
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()
        self._selector.register(self._bell.descriptor, selectors.EVENT_READ)
        self._finder = None if finds is None else PeerFinder(finds, self.connect, self._not_reached)
        self._ticked: Tick = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvell-mempool", daemon=True)

    @property
    def address(self) -> Endpoint | None:
        return self.connections.address

    def start(self) -> None:
        """Start the thread and accept connections."""
        self._thread.start()
        self.connections.open()

    def close(self) -> None:
        """Close all connections, end all copies and release all rights. Idempotent."""
        if self._is_closing:
            return
        with contextlib.suppress(TryLater):
            self.ask(self.hang_up)
        self._is_closing = True
        self._bell.ring()
        self._thread.join()
        for peer in [*self.connected.values(), *chain(*self._beside.values())]:
            peer.close()  # it connected meanwhile
        if self._finder is not None:
            self._finder.threads.shutdown()
        self.connections.close()
        if self._lent is not None:
            self._lent.close()
        self.mover.close()
        self.rights.close()
        self._selector.close()
        self._bell.close()

    def now(self) -> Tick:
        return int(self._clock.now_seconds() * 1000)

    def ask(self, call: Callable[[], Answer]) -> Answer:
        """Run a call on the node's thread, the only one that uses the memory core.

        :raises TryLater: when the node is closed.
        """
        if threading.current_thread() is self._thread:
            return call()
        if self._is_closing:
            raise TryLater("the memory pool is closed")
        answer: Future[Answer] = Future()
        self._asked.put((answer, call))
        self._bell.ring()
        if not self._thread.is_alive():  # it may have ended before it saw the call
            self._refuse_all()
        return answer.result()

    def act(self, actions: Sequence[Action]) -> None:
        """Execute actions in order. Runs on the node's thread."""
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Pull):
                peer = self.connected.get(action.transfer.sender)
                is_its = peer and peer.greeting.incarnation == action.transfer.incarnation
                self.mover.pull(action, peer.source if peer and is_its else None)
            elif isinstance(action, PullRest):
                self.mover.rest(action.transfer)
            elif isinstance(action, StopPull):
                self.mover.stop(action.transfer)
            elif isinstance(action, Grant):
                self.grant_right(action)
            elif isinstance(action, Revoke):
                self.revoke(action)
            elif isinstance(action, News):
                self._tells(action)

    def grant_right(self, action: Grant) -> None:
        """Let a receiver read the pages offered or lent to it. Any thread may call this."""
        pages = np.frombuffer(action.pages, "<i4").reshape(-1, 2)
        rows = pages[:, [0, 1, 1]].astype(np.int32)
        extents = [(piece.source, piece.size_bytes) for piece in pieces_of(self._groups, rows)]
        number, receiver = action.transfer.number, action.receiver
        self.rights.grant(number, "" if action.lends else receiver, extents)
        if action.lends and self._lent is not None:
            of = [pages[pages[:, 0] == group, 1].tolist() for group in range(len(self._groups))]
            self._lent.lend(number, receiver, of)

    def revoke(self, action: Revoke) -> None:
        """End a right to read. No reader is left when this returns. Any thread may call this."""
        self.rights.revoke(action.transfer.number)
        if self._lent is not None:
            self._lent.end(action.transfer.number)

    def peers(self) -> list[str]:
        return self.ask(lambda: sorted(self.connected))

    def connect(self, address: Endpoint, name: str = "") -> str:
        """Connect to an instance and return its name.

        :param name: the required name of the instance; "": any.
        :raises TryLater: when no instance answers there.
        :raises ChangeSomething: when the peer is of another cluster, or has another name.
        """
        peer = self.connections.connect(address, name)
        try:
            self.ask(lambda: self._enter(peer))
        except TryLater:
            peer.close()
            raise
        return peer.greeting.instance

    def _enter(self, peer: Peer) -> None:
        """Add a new connection.

        Both sides may connect at the same time.  Then both connections stay, since a message may be
        on its way in either; this side sends through the older one.

        :raises TryLater: when a later incarnation of the instance is connected.
        """
        name = peer.greeting.instance
        old = self.connected.get(name)
        if old is not None and old.greeting.incarnation > peer.greeting.incarnation:
            raise TryLater(f"{name} has restarted since")
        if old is not None and old.greeting.incarnation < peer.greeting.incarnation:
            self._lose(old)
        if name in self.connected:
            self._beside.setdefault(name, []).append(peer)
        else:
            self.connected[name] = peer
            first = self.creditors.meet(peer)
            if first is not None:
                met = PeerMapped(name, peer.greeting.incarnation, first)
                self.act(self._handle(met))
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        if self._finder is not None:
            self.act(self._finder.take(name))

    def _lose(self, peer: Peer) -> None:
        name = peer.greeting.instance
        if peer is not self.connected.get(name) and peer not in self._beside.get(name, ()):
            return
        for connection in (self.connected.pop(name), *self._beside.pop(name, ())):
            self._selector.unregister(connection.socket)
            connection.close()
        self.act(self._handle(PeerLost(name, peer.greeting.incarnation)))

    def wake_at(self, deadline: Tick | None) -> None:
        """Deliver :class:`Ticked` at a deadline, once. Any thread may call this.

        The caller sets the next deadline after it has handled the tick.
        """
        self._deadline = deadline
        if deadline is not None and threading.current_thread() is not self._thread:
            self._bell.ring()

    def post(self, actions: Sequence[Action]) -> None:
        """Let the node's thread execute actions. Any thread may call this."""
        self._asked.put((Future(), partial(self.act, actions)))
        self._bell.ring()

    def _tick(self) -> None:
        now = self.now()
        is_due = self._deadline is not None and self._deadline <= now
        if is_due or now - self._ticked >= TICK_MILLISECONDS:
            self._ticked = now
            if is_due:  # the owner sets the next one after this tick, maybe after a long step
                self._deadline = None
            self.act(self._handle(Ticked(now)))

    def _not_reached(self, name: str) -> None:
        """Report the loss of an instance that messages wait for. Any thread may call this."""
        finder = self._finder

        def lose() -> None:
            if finder is not None and finder.take(name):
                self.act(self._handle(PeerLost(name, 0)))

        with contextlib.suppress(TryLater):
            self.ask(lose)

    def _send(self, action: Send) -> None:
        peer = self.connected.get(action.instance)
        if peer is not None:
            try:
                peer.send(action.message)
            except PeerClosedError:
                self._lose(peer)
        elif self._finder is not None:
            self._finder.reach(action)
        else:
            self.act(self._handle(PeerLost(action.instance, 0)))

    def _pull_ended(self, transfer: Transfer, problem: str) -> None:
        self._asked.put((Future(), lambda: self.act(self._handle(PullEnded(transfer, problem)))))
        self._bell.ring()

    def hang_up(self) -> None:
        for peer in list(self.connected.values()):
            self._lose(peer)

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            self._is_closing = True
            self._refuse_all()

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                answer, _ = self._asked.get_nowait()
                answer.set_exception(TryLater("the memory pool is closed"))

    def _loop(self) -> None:
        while not self._is_closing:
            ready = self._selector.select(self._pause_seconds())
            self._tick()  # after a pause, deadlines of received messages count from now
            for key, mask in ready:
                if key.fd == self._bell.descriptor:
                    self._bell.clear()
                else:
                    self._hear(key.data, mask)
            with contextlib.suppress(queue.Empty):
                while True:
                    _answer(*self._asked.get_nowait())
            self._tick()
            for peer in list(self.connected.values()):
                writing = selectors.EVENT_WRITE if peer.pending else 0
                self._selector.modify(peer.socket, selectors.EVENT_READ | writing, peer)

    def _pause_seconds(self) -> float | None:
        if self._deadline is None:
            return LONGEST_PAUSE_SECONDS
        return min(LONGEST_PAUSE_SECONDS, max(0.0, (self._deadline - self.now()) / 1000))

    def _hear(self, peer: Peer, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                peer.line.flush()
            if mask & selectors.EVENT_READ:
                name = peer.greeting.instance
                for message in peer.receive():
                    if not isinstance(message, Written):
                        self.act(self._handle(Heard(name, message)))
                    elif message.transfer.sender == name:
                        self.mover.written(message.transfer, message.stage)
        except PeerClosedError:
            self._lose(peer)
        except Exception:  # an error here, triggered by one peer, must not affect the others
            logger.exception("internal error on the connection with %s", peer.greeting.instance)
            self._lose(peer)


def _answer(answer: "Future[Answer]", call: Callable[[], Answer]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # the caller raises it
        answer.set_exception(error)
