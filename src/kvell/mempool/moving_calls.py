"""The pool's calls between instances: sending texts and fetching texts."""

import queue
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvell.errors import ChangeSomething, TryLater
from kvell.memory import HoldingCore, Ints, Layout
from kvell.mempool.agent import Agent
from kvell.mempool.buffer import MEDIA, Address, HostBuffer, Lease, Media, Medium
from kvell.mempool.holds import Hold
from kvell.mempool.node import News, PageTransferThread
from kvell.mempool.owners import HoldKind, Owner, Tick
from kvell.mempool.transfers.actions import Arrived, Ended, Fetched
from kvell.mempool.transfers.asking import NOTHING_MORE
from kvell.mempool.transfers.copies import whole
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.receiving import owner_of
from kvell.wire.endpoints import Endpoint


class _Pool(Protocol):
    """The members of the pool that these calls use."""

    layout: Layout
    instance: str
    incarnation: int
    _agent: Agent
    _node: PageTransferThread
    _buffer: HostBuffer | None

    def _owner(self, kind: HoldKind) -> Owner: ...

    def _address(self, medium: Medium, group: int, position: int, page: int) -> Address: ...

    def _deadline(self, seconds: float) -> Tick: ...


class BufferedCalls:
    """The part of :class:`.pool.MemPool` for host memory; every call runs on the node's thread."""

    def swap_out(self: _Pool, tokens: Sequence[int], *, root: str = "", model: str = "") -> int:
        """Copy a text's cached pages to host memory, and free the pool's pages without other users.

        :returns: the number of tokens that can be swapped in again.
        :raises ChangeSomething: without ``cpu_buffer_bytes``, or for layers with images or drafts.
        :raises TryLater: if host memory has too little room; then the text stays in the pool.
        """
        text = np.asarray(tokens, np.int32)
        buffer = buffer_of(self._buffer)
        return self._node.ask(lambda: buffer.swap_out(text, root, model))

    def swap_in(self: _Pool, tokens: Sequence[int], *, root: str = "", model: str = "") -> int:
        """Copy the missing pages of a text to the pool and cache it there.

        The pages also stay in host memory until other texts need the room.

        :returns: the number of tokens that the pool has now.
        :raises ChangeSomething: as :meth:`swap_out`.
        :raises TryLater: if the pool has too little room, even after evictions.
        """
        text = np.asarray(tokens, np.int32)
        buffer = buffer_of(self._buffer)
        return self._node.ask(lambda: buffer.swap_in(text, root, model))

    def _match_tiers(
        self: _Pool, tokens: Sequence[int], root: str, model: str, seconds: float, media: Media
    ) -> Lease:
        if media not in MEDIA:
            raise ChangeSomething(
                "media", media, "is not a place to look", f"use {', '.join(MEDIA)}"
            )
        text = np.asarray(tokens, np.int32)
        buffer = buffer_of(self._buffer)

        def matched() -> Lease:
            owner = self._owner("match")
            deadline = self._deadline(seconds)
            hold, pages = buffer.hold(owner, deadline, text, root, model, media)
            addresses = tuple(self._address(*page) for page in pages)
            self._node.wake_at(self._agent.next_deadline)
            return Lease(owner, deadline, addresses, hold.hit_tokens)

        return self._node.ask(matched)

    def _address(self: _Pool, medium: Medium, group: int, position: int, page: int) -> Address:
        offset = page * self.layout.groups[group].page_stride_bytes
        place = group, position, page, offset
        return Address(self.instance, self.incarnation, *place, medium)

    def _host_view(self: _Pool, address: Address) -> npt.NDArray[np.uint8]:
        return buffer_of(self._buffer).view(address.group, address.page)

    def _bring_in(self: _Pool, tokens: Sequence[int], root: str, model: str) -> None:
        """Swap a text in before it is sent. Runs on the node's thread."""
        if self._buffer is not None:
            self._buffer.swap_in(np.asarray(tokens, np.int32), root, model)


def buffer_of(buffer: HostBuffer | None) -> HostBuffer:
    """Return the pool's host memory.

    :raises ChangeSomething: if the pool has none.
    """
    if buffer is None:
        problem, remedy = "gives no host memory to swap to", "give the MemPool some bytes of it"
        raise ChangeSomething("cpu_buffer_bytes", 0, problem, remedy)
    return buffer


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
