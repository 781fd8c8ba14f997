"""The pool's calls (MemServe, Table 1), for programs that keep KV memory without an engine.

::

    with MemPool(layout, instance="a", address=Path("/tmp/a")) as a, …:
        lease = a.alloc_mem(tokens=100)
        a.view(lease.addresses[0])[:] = …
        a.insert(tokens, lease)
        a.connect(Path("/tmp/b"))  # or "tcp://10.0.0.2:5000"
        a.transfer_with_insert("b", tokens)
"""

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial, partialmethod
from typing import Self

import numpy as np
import numpy.typing as npt

from kvell.device.host import HostPool
from kvell.errors import ChangeSomething, TryLater
from kvell.memory import (
    HoldingCore,
    Ints,
    Layout,
    create_core,
    pages_of_text,
)
from kvell.mempool.agent import Agent
from kvell.mempool.buffer import MEDIA, Address, HostBuffer, Lease, Media, Medium
from kvell.mempool.entries import PeerEntry
from kvell.mempool.holds import Hold
from kvell.mempool.node import News, PageTransferThread
from kvell.mempool.owners import HoldKind, Owner
from kvell.mempool.transfers.actions import Action, Arrived, Ended, Fetched
from kvell.mempool.transfers.asking import NOTHING_MORE
from kvell.mempool.transfers.copies import whole
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.receiving import owner_of
from kvell.mempool.transports.page_copies import Bytes
from kvell.vocabulary import PageId
from kvell.wire.endpoints import Endpoint
from kvell.wire.greeting import new_incarnation

LEASE_SECONDS = 30.0
TRANSFER_SECONDS = 30.0


class MemPool:
    """The KV memory of one instance, with connections to others.

    :param layout: from :func:`kvell.memory.plan_layout`; instances with equal groups may exchange
        pages, whatever the sizes of their pools.
    :param content: what else decides the bytes of a page: weights, element types.
    :param address: the address to listen at: a path for a socket of this host, or
        ``tcp://host:port`` (port 0: any free port); None: other instances cannot connect.
    :param secret: the secret of the cluster; for TCP 16 bytes or more.
    :param cpu_buffer_bytes: the size of the host memory for swapped texts; 0: none.
    :raises ChangeSomething: when the system refuses the memory, the address cannot be bound, or the
        secret is too short for TCP.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        instance: str,
        content: str = "",
        address: Endpoint | None = None,
        secret: bytes = b"",
        cpu_buffer_bytes: int = 0,
    ) -> None:
        self.layout, self.instance = layout, instance
        self.incarnation = new_incarnation()
        self._host = HostPool(layout.pool_bytes)
        self.memory: Bytes = np.frombuffer(self._host.buffer(), np.uint8)[: layout.pool_bytes]
        self.core: HoldingCore = create_core(layout)
        self.agent = Agent(self.core, instance, self.incarnation, content)
        self._arrivals: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._operation = 0
        self._sent: dict[Transfer, Future[None]] = {}
        self._fetching: dict[int, Future[Fetched]] = {}
        self.buffer: HostBuffer | None = None
        try:
            if cpu_buffer_bytes:
                self.buffer = HostBuffer(self.core, self.agent.holds, self.memory, cpu_buffer_bytes)
            self.node = PageTransferThread(
                instance,
                self.incarnation,
                self.agent.fingerprint,
                self._handled,
                layout.groups,
                self.memory,
                self._host.descriptor,
                address=address,
                secret=secret,
                tells=self._told,
            )
        except ChangeSomething:
            del self.memory
            self._host.close()
            raise
        self.node.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and free the memory; its views become invalid."""
        self.node.close()
        for hold in list(self.agent.holds.values()):
            self.agent.holds.release(hold.owner)
        self.__dict__.pop("memory", None)
        self._host.close()

    # ------------------------------------------------------------- memory blocks

    def alloc_mem(
        self,
        *,
        tokens: int | None = None,
        pages: Mapping[str, int] | None = None,
        model: str = "",
        seconds: float = LEASE_SECONDS,
    ) -> Lease:
        """Allocate empty pages.

        :param tokens: the length of a text, for the pages that a request needs to continue after
            it (of a window its end, one state).
        :param pages: or the number of pages of each group, by the group's name.
        :param seconds: the time after which the pages are freed automatically.
        :raises ChangeSomething: if neither or both are given, or a group is unknown.
        :raises TryLater: if there are too few pages, even after evictions.
        """
        firsts, counts = self._counts(tokens, pages, model).T

        def held() -> Lease:
            owner = self._owner("alloc")
            deadline = self._deadline(seconds)
            hold = self.agent.holds.hold_pages(owner, deadline, counts, model=model)
            if hold is None:
                raise TryLater(f"too few pages are empty or only cached for {counts.tolist()}")
            return self._lease(hold, firsts)

        return self.node.ask(held)

    def free_mem(self, lease: Lease) -> bool:
        """Free a lease's pages and return whether they were still held. Idempotent."""

        def freed() -> bool:
            was_held = self.agent.holds.release(lease.owner)
            self._sweep()
            return was_held

        return self.node.ask(freed)

    def view(self, address: Address) -> npt.NDArray[np.uint8]:
        """Return the bytes of a local page, to read and write while its lease is valid.

        :raises ChangeSomething: if the page belongs to another instance or incarnation.
        """
        if (address.instance, address.incarnation) != (self.instance, self.incarnation):
            problem, remedy = "is not of this instance", "transfer it here first"
            raise ChangeSomething("address", address, problem, remedy)
        if address.medium == "host":
            return self._host_buffer().view(address.group, address.page)
        size_bytes = self.layout.groups[address.group].page_stride_bytes
        return self.memory[address.offset : address.offset + size_bytes]

    # --------------------------------------------------------------------- index

    def insert(self, tokens: Sequence[int], lease: Lease, *, root: str = "") -> None:
        """Cache a text whose KV was written to the pages of a lease, and end the lease.

        :param root: texts share prefixes only within one root.
        :raises TryLater: if the lease has expired.
        :raises ChangeSomething: if the lease has another number of pages than the text needs.
        """
        text = np.asarray(tokens, np.int32)

        def inserted() -> None:
            if lease.owner not in self.agent.holds:
                raise TryLater("the lease has expired; its pages may have been reused")
            try:
                self.agent.holds.adopt(lease.owner, text, root)
            except ValueError as error:
                remedy = f"get them with alloc_mem(tokens={len(text)})"
                raise ChangeSomething("lease", lease.owner.operation, str(error), remedy) from error
            self.agent.holds.insert(lease.owner, len(text))

        self.node.ask(inserted)

    def match(
        self,
        tokens: Sequence[int],
        *,
        root: str = "",
        model: str = "",
        seconds: float = LEASE_SECONDS,
        media: Media = "device",
    ) -> Lease:
        """Hold the longest cached prefix from which every layer group can resume.

        The lease's ``hit_tokens`` may be 0; then it has no addresses.

        :param media: ``device`` matches in the pool, ``host`` among swapped-out texts, and
            ``mixed`` each page in either.  Addresses name the medium.
        """
        if media != "device":
            return self._match_tiers(tokens, root, model, seconds, media)

        def matched() -> Lease:
            owner = self._owner("match")
            deadline = self._deadline(seconds)
            return self._lease(
                self.agent.holds.hold_text(owner, deadline, whole(tokens), root, model=model)
            )

        return self.node.ask(matched)

    def delete(self, tokens: Sequence[int], *, root: str = "", model: str = "") -> int:
        """Evict the cached pages of a text alone and return their number.

        Pages that other texts share, and held pages, stay.
        """
        text = np.asarray(tokens, np.int32)

        def deleted() -> int:
            swapped = self.buffer.delete(text, root, model) if self.buffer is not None else 0
            return swapped + self.core.delete(text, root, model=model)

        return self.node.ask(deleted)

    # --------------------------------------------------------------- host memory

    def swap_out(self, tokens: Sequence[int], *, root: str = "", model: str = "") -> int:
        """Copy a text's cached pages to host memory, and free the pool's pages without other users.

        :returns: the number of tokens that can be swapped in again.
        :raises ChangeSomething: without ``cpu_buffer_bytes``, or for layers with images or drafts.
        :raises TryLater: if host memory has too little room; then the text stays in the pool.
        """
        text = np.asarray(tokens, np.int32)
        buffer = self._host_buffer()
        return self.node.ask(lambda: buffer.swap_out(text, root, model))

    def swap_in(self, tokens: Sequence[int], *, root: str = "", model: str = "") -> int:
        """Copy the missing pages of a text to the pool and cache it there.

        The pages also stay in host memory until other texts need the room.

        :returns: the number of tokens that the pool has now.
        :raises ChangeSomething: as :meth:`swap_out`.
        :raises TryLater: if the pool has too little room, even after evictions.
        """
        text = np.asarray(tokens, np.int32)
        buffer = self._host_buffer()
        return self.node.ask(lambda: buffer.swap_in(text, root, model))

    # ------------------------------------------------------------ other instances

    @property
    def address(self) -> Endpoint | None:
        return self.node.address

    def connect(self, address: Endpoint) -> str:
        """Connect to another instance and return its name.

        :param address: the ``address`` of that instance.
        :raises TryLater: when no instance answers there.
        :raises ChangeSomething: when the peer is not an instance of this cluster.
        """
        return self.node.connect(address)

    def peers(self) -> list[str]:
        return self.node.peers()

    def transfer(
        self,
        instance: str,
        tokens: Sequence[int],
        *,
        root: str = "",
        model: str = "",
        private: bytes = b"",
        seconds: float = TRANSFER_SECONDS,
        inserts: bool = False,
    ) -> int:
        """Send the cached part of a text; the receiver's user gets it from :meth:`next_arrival`.

        The receiver uses its own cached pages and allocates the rest; only the rest is sent.

        :param inserts: whether the receiver caches the text, as :meth:`transfer_with_insert` asks.
        :returns: the number of tokens that the receiver has now.
        :raises ChangeSomething: if no part of the text is cached here.
        :raises TryLater: if the receiver is not connected, has no room, or gave up.
        """

        def begun() -> tuple[Future[None], int]:
            self._bring_in(tokens, root, model)
            transfer, actions = self.agent.copies.begin(
                instance,
                np.asarray(tokens, np.int32),
                self.node.now(),
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
            length = self.agent.copies.length(transfer)
            self.node.act(actions)
            self.node.wake_at(self.agent.next_deadline)
            return done, length

        done, computed = self.node.ask(begun)
        done.result()
        return computed

    transfer_with_insert = partialmethod(transfer, inserts=True)
    """Send the cached part of a text like :meth:`transfer`; the receiver caches it."""

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
            number, actions = self.agent.asking.ask(
                instance,
                text,
                self.node.now(),
                self._deadline(seconds),
                root=root,
                model=model,
                beyond=cached_tokens,
            )
            done = self._fetching[number] = Future()
            self.node.act(actions)
            self.node.wake_at(self.agent.next_deadline)
            return done, cached_tokens

        done, cached_tokens = self.node.ask(asked)
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
            if owner not in self.agent.holds:
                return None  # the caller did not ask for it in time
            hold = self.agent.holds[owner]
            hold.deadline = self._deadline(lease_seconds)
            hold.hit_tokens = arrived.computed
            return self._lease(hold)

        while True:
            left_seconds = max(0.0, (ends - self.node.now()) / 1000)
            try:
                arrived = self._arrivals.get(timeout=left_seconds)
            except queue.Empty:
                raise TryLater(f"no text arrived within {seconds:g} s") from None
            lease = self.node.ask(partial(leased, arrived))
            if lease is not None:
                return lease, arrived.announced

    # ------------------------------------------------------------------- private

    def _handled(self, entry: PeerEntry) -> list[Action]:
        actions = self.agent.handle(entry)
        self._sweep()
        self.node.wake_at(self.agent.next_deadline)
        return actions

    def _counts(self, tokens: int | None, pages: Mapping[str, int] | None, model: str) -> Ints:
        """Return the pages of each group [groups, :class:`.PageCountRow`]."""
        if (tokens is None) == (pages is None):
            raise ChangeSomething("tokens", tokens, "or pages must be given", "give one of them")
        if tokens is not None:
            return pages_of_text(self.layout, tokens, model=model)
        assert pages is not None
        names = [group.name for group in self.layout.groups]
        for name in pages:
            if name not in names:
                remedy = f"use {', '.join(names)}"
                raise ChangeSomething("pages", name, "is not a layer group", remedy)
        return np.asarray([(0, pages.get(name, 0)) for name in names], np.int32)

    def _host_buffer(self) -> HostBuffer:
        """Return the pool's host memory.

        :raises ChangeSomething: if it has none.
        """
        if self.buffer is None:
            problem, remedy = "gives no host memory to swap to", "give the MemPool some bytes of it"
            raise ChangeSomething("cpu_buffer_bytes", 0, problem, remedy)
        return self.buffer

    def _match_tiers(
        self, tokens: Sequence[int], root: str, model: str, seconds: float, media: Media
    ) -> Lease:
        if media not in MEDIA:
            raise ChangeSomething(
                "media", media, "is not a place to look", f"use {', '.join(MEDIA)}"
            )
        text = np.asarray(tokens, np.int32)
        buffer = self._host_buffer()

        def matched() -> Lease:
            owner = self._owner("match")
            deadline = self._deadline(seconds)
            hold, pages = buffer.hold(owner, deadline, text, root, model, media)
            addresses = tuple(self._address(*page) for page in pages)
            self.node.wake_at(self.agent.next_deadline)
            return Lease(owner, deadline, addresses, hold.hit_tokens)

        return self.node.ask(matched)

    def _address(self, medium: Medium, group: int, position: int, page: PageId) -> Address:
        offset = page * self.layout.groups[group].page_stride_bytes
        place = group, position, page, offset
        return Address(self.instance, self.incarnation, *place, medium)

    def _bring_in(self, tokens: Sequence[int], root: str, model: str) -> None:
        """Swap a text in before it is sent. Runs on the node's thread."""
        if self.buffer is not None:
            self.buffer.swap_in(np.asarray(tokens, np.int32), root, model)

    def _told(self, news: News) -> None:
        if isinstance(news, Fetched):
            self._fetching.pop(news.number).set_result(news)
        elif isinstance(news, Arrived):
            if owner_of(news.transfer) in self.agent.holds:
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
        if self.buffer is not None:
            self.buffer.sweep()

    def _owner(self, kind: HoldKind) -> Owner:
        self._operation += 1
        return Owner(kind, self.instance, self.incarnation, self._operation)

    def _deadline(self, seconds: float) -> int:
        return self.node.now() + int(seconds * 1000)

    def _lease(self, hold: Hold, firsts: Ints | None = None) -> Lease:
        self.node.wake_at(self.agent.next_deadline)
        before = [0] * len(self.layout.groups) if firsts is None else firsts.tolist()
        addresses = tuple(
            self._address("device", group, before[group] + position, page)
            for group, position, page in self.agent.holds.pages(hold.owner).tolist()
        )
        return Lease(hold.owner, hold.deadline, addresses, hold.hit_tokens)
