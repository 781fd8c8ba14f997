"""The pool's calls between instances: sending texts and fetching texts."""

import queue
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from kvell.errors import ChangeSomething, TryLater
from kvell.memory import HoldingCore, Ints, Layout
from kvell.mempool.addresses import Lease
from kvell.mempool.agent import Agent
from kvell.mempool.buffer import HostBuffer
from kvell.mempool.buffered_calls import BufferedCalls
from kvell.mempool.holds import Hold
from kvell.mempool.node import News, PageTransferThread
from kvell.mempool.owners import HoldKind, Owner
from kvell.mempool.transfers.actions import Arrived, Ended, Fetched
from kvell.mempool.transfers.asking import NOTHING_MORE
from kvell.mempool.transfers.copies import whole
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.receiving import owner_of
from kvell.wire.endpoints import Endpoint

LEASE_SECONDS = 30.0
TRANSFER_SECONDS = 30.0


class MovingCalls(BufferedCalls):
    """The part of :class:`.pool.MemPool` for transfers."""

    layout: Layout
    instance: str
    incarnation: int
    core: HoldingCore
    _agent: Agent
    _node: PageTransferThread
    _buffer: HostBuffer | None
    _arrivals: "queue.SimpleQueue[Arrived]"
    _sent: dict[Transfer, Future[None]]
    _fetching: dict[int, Future[Fetched]]
    _operation: int

    @property
    def address(self) -> Endpoint | None:
        return self._node.address

    def connect(self, address: Endpoint) -> str:
        """Connect to another instance and return its name.

        :param address: the ``address`` of that instance.
        :raises TryLater: when no instance answers there.
        :raises ChangeSomething: when the peer is not an instance of this cluster.
        """
        return self._node.connect(address)

    def peers(self) -> list[str]:
        return self._node.peers()

    def transfer(
        self,
        instance: str,
        tokens: Sequence[int],
        *,
        root: str = "",
        model: str = "",
        private: bytes = b"",
        seconds: float = TRANSFER_SECONDS,
    ) -> int:
        """Send the cached part of a text; the receiver's user gets it from :meth:`next_arrival`.

        The receiver uses its own cached pages and allocates the rest; only the rest is sent.

        :returns: the number of tokens that the receiver has now.
        :raises ChangeSomething: if no part of the text is cached here.
        :raises TryLater: if the receiver is not connected, has no room, or gave up.
        """
        return self._transfer(instance, tokens, root, model, private, seconds, inserts=False)

    def transfer_with_insert(
        self,
        instance: str,
        tokens: Sequence[int],
        *,
        root: str = "",
        model: str = "",
        private: bytes = b"",
        seconds: float = TRANSFER_SECONDS,
    ) -> int:
        return self._transfer(instance, tokens, root, model, private, seconds, inserts=True)

    def fetch(
        self,
        instance: str,
        tokens: Sequence[int],
        *,
        root: str = "",
        model: str = "",
        seconds: float = TRANSFER_SECONDS,
    ) -> int:
        """Fetch the part of a text that an instance has beyond the part cached here, and cache it.

        :returns: the number of tokens then cached here; unchanged if the instance has no more.
        :raises TryLater: if the instance is not connected, or does not send the text in time.
        """
        text = np.asarray(tokens, np.int32)

        def asked() -> tuple[Future[Fetched], int]:
            self._bring_in(tokens, root, model)
            cached_tokens = self.core.peek(whole(tokens), root, model=model)
            number, actions = self._agent.asking.ask(
                instance,
                text,
                self._node.now(),
                self._deadline(seconds),
                root=root,
                model=model,
                beyond=cached_tokens,
            )
            done = self._fetching[number] = Future()
            self._node.act(actions)
            self._node.wake_at(self._agent.next_deadline)
            return done, cached_tokens

        done, cached_tokens = self._node.ask(asked)
        fetched = done.result()
        if fetched.problem and fetched.problem != NOTHING_MORE:
            raise TryLater(f"{instance} does not send it: {fetched.problem}")
        return max(cached_tokens, fetched.computed)

    def next_arrival(
        self, seconds: float, lease_seconds: float = LEASE_SECONDS
    ) -> tuple[Lease, bytes]:
        """Wait for a text sent by :meth:`transfer`, and return its pages and its private bytes.

        :raises TryLater: if no text arrives in time.
        """
        ends = self._deadline(seconds)

        def leased(arrived: Arrived) -> Lease | None:
            owner = owner_of(arrived.transfer)
            if owner not in self._agent.holds:
                return None  # the caller did not ask for it in time
            hold = self._agent.holds[owner]
            hold.deadline = self._deadline(lease_seconds)
            hold.hit_tokens = arrived.computed
            return self._lease(hold)

        while True:
            left_seconds = max(0.0, (ends - self._node.now()) / 1000)
            try:
                arrived = self._arrivals.get(timeout=left_seconds)
            except queue.Empty:
                raise TryLater(f"no text arrived within {seconds:g} s") from None
            lease = self._node.ask(partial(leased, arrived))
            if lease is not None:
                return lease, arrived.announced

    # ------------------------------------------------------------------- private

    def _transfer(
        self,
        instance: str,
        tokens: Sequence[int],
        root: str,
        model: str,
        private: bytes,
        seconds: float,
        *,
        inserts: bool,
    ) -> int:
        def begun() -> tuple[Future[None], int]:
            self._bring_in(tokens, root, model)
            transfer, actions = self._agent.copies.begin(
                instance,
                np.asarray(tokens, np.int32),
                self._node.now(),
                self._deadline(seconds),
                root=root,
                model=model,
                inserts=inserts,
                private=private,
            )
            if transfer is None:
                remedy = "insert it first"
                raise ChangeSomething("tokens", f"{len(tokens)} tokens", "are not cached", remedy)
            done = self._sent[transfer] = Future()
            length = self._agent.copies.length(transfer)
            self._node.act(actions)
            self._node.wake_at(self._agent.next_deadline)
            return done, length

        done, computed = self._node.ask(begun)
        done.result()
        return computed

    def _told(self, news: News) -> None:
        if isinstance(news, Fetched):
            self._fetching.pop(news.number).set_result(news)
        elif isinstance(news, Arrived):
            if owner_of(news.transfer) in self._agent.holds:
                self._arrivals.put(news)
        elif isinstance(news, Ended):
            if news.transfer not in self._sent:
                return  # the answer to a fetch of another instance
            done = self._sent.pop(news.transfer)
            if news.problem:
                done.set_exception(TryLater(f"the transfer ended: {news.problem}"))
            else:
                done.set_result(None)

    def _sweep(self) -> None:
        if self._buffer is not None:
            self._buffer.sweep()

    def _owner(self, kind: HoldKind) -> Owner:
        self._operation += 1
        return Owner(kind, self.instance, self.incarnation, self._operation)

    def _deadline(self, seconds: float) -> int:
        return self._node.now() + int(seconds * 1000)

    def _lease(self, hold: Hold, firsts: Ints | None = None) -> Lease:
        self._node.wake_at(self._agent.next_deadline)
        before = [0] * len(self.layout.groups) if firsts is None else firsts.tolist()
        addresses = tuple(
            self._address("device", group, before[group] + position, page)
            for group, position, page in self._agent.holds.pages(hold.owner).tolist()
        )
        return Lease(hold.owner, hold.deadline, addresses, hold.hit_tokens)
