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
from types import TracebackType
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
from kvell.mempool.buffer import Address, HostBuffer, Lease, Media
from kvell.mempool.entries import PeerEntry
from kvell.mempool.moving_calls import LEASE_SECONDS, MovingCalls
from kvell.mempool.node import PageTransferThread
from kvell.mempool.transfers.actions import Action, Arrived, Fetched
from kvell.mempool.transfers.copies import whole
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transports.page_copies import Bytes
from kvell.wire.endpoints import Endpoint
from kvell.wire.greeting import new_incarnation


class MemPool(MovingCalls):
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
        self._agent = Agent(self.core, instance, self.incarnation, content)
        self._arrivals: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._operation = 0
        self._sent: dict[Transfer, Future[None]] = {}
        self._fetching: dict[int, Future[Fetched]] = {}
        self._buffer: HostBuffer | None = None
        try:
            if cpu_buffer_bytes:
                self._buffer = HostBuffer(
                    self.core, self._agent.holds, self.memory, cpu_buffer_bytes
                )
            self._node = PageTransferThread(
                instance,
                self.incarnation,
                self._agent.fingerprint,
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
        self._node.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and free the memory; its views become invalid."""
        self._node.close()
        for hold in list(self._agent.holds):
            self._agent.holds.release(hold.owner)
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
            hold = self._agent.holds.hold_pages(owner, deadline, counts, model=model)
            if hold is None:
                raise TryLater(f"too few pages are empty or only cached for {counts.tolist()}")
            return self._lease(hold, firsts)

        return self._node.ask(held)

    def free_mem(self, lease: Lease) -> bool:
        """Free a lease's pages and return whether they were still held. Idempotent."""

        def freed() -> bool:
            was_held = self._agent.holds.release(lease.owner)
            self._sweep()
            return was_held

        return self._node.ask(freed)

    def view(self, address: Address) -> npt.NDArray[np.uint8]:
        """Return the bytes of a local page, to read and write while its lease is valid.

        :raises ChangeSomething: if the page belongs to another instance or incarnation.
        """
        if (address.instance, address.incarnation) != (self.instance, self.incarnation):
            problem, remedy = "is not of this instance", "transfer it here first"
            raise ChangeSomething("address", address, problem, remedy)
        if address.medium == "host":
            return self._host_view(address)
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
            self._require(lease)
            try:
                self._agent.holds.adopt(lease.owner, text, root)
            except ValueError as error:
                remedy = f"get them with alloc_mem(tokens={len(text)})"
                raise ChangeSomething("lease", lease.owner.operation, str(error), remedy) from error
            self._agent.holds.insert(lease.owner, len(text))

        self._node.ask(inserted)

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
                self._agent.holds.hold_text(owner, deadline, whole(tokens), root, model=model)
            )

        return self._node.ask(matched)

    def delete(self, tokens: Sequence[int], *, root: str = "", model: str = "") -> int:
        """Evict the cached pages of a text alone and return their number.

        Pages that other texts share, and held pages, stay.
        """
        text = np.asarray(tokens, np.int32)

        def deleted() -> int:
            swapped = self._buffer.delete(text, root, model) if self._buffer is not None else 0
            return swapped + self.core.delete(text, root, model=model)

        return self._node.ask(deleted)

    # ------------------------------------------------------------------- private

    def _handled(self, entry: PeerEntry) -> list[Action]:
        actions = self._agent.handle(entry)
        self._sweep()
        self._node.wake_at(self._agent.next_deadline)
        return actions

    def _counts(self, tokens: int | None, pages: Mapping[str, int] | None, model: str) -> Ints:
        """Return the first position and the number of pages of each group [groups, 2]."""
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

    def _require(self, lease: Lease) -> None:
        if lease.owner not in self._agent.holds:
            raise TryLater("the lease has expired; its pages may have been reused")
