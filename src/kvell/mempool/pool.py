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
    Implementation,
    Ints,
    Layout,
    create_core,
    pages_of_text,
)
from kvell.mempool.addresses import Address, Lease
from kvell.mempool.agent import Agent
from kvell.mempool.buffer import HostBuffer, Media
from kvell.mempool.entries import PeerEntry
from kvell.mempool.moving_calls import LEASE_SECONDS, MovingCalls
from kvell.mempool.node import Node
from kvell.mempool.transfers.actions import Action, Arrived, Fetched
from kvell.mempool.transfers.copies import whole
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transports.page_copies import Bytes
from kvell.wire.endpoints import Endpoint
from kvell.wire.greeting import new_incarnation


class MemPool(MovingCalls):
    """KV memory of one instance, which others can be connected to.

    :param layout: of :func:`kvell.memory.plan_layout`; instances with equal groups may exchange
        pages, whatever the sizes of their pools.
    :param content: what else decides the bytes of a page: weights, element types.
    :param address: at which others connect: a path for a socket of this host, or
        ``tcp://host:port`` (port 0: any that is free); None: none can.
    :param secret: which all instances of the cluster know; over TCP of 16 bytes or more.
    :param cpu_buffer_bytes: of host memory to swap texts to; 0: none.
    :raises ChangeSomething: when the system refuses so much memory, the address cannot be bound,
        or the secret is too short for it.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        instance: str,
        content: str = "",
        address: Endpoint | None = None,
        secret: bytes = b"",
        implementation: Implementation = "auto",
        cpu_buffer_bytes: int = 0,
    ) -> None:
        self.layout, self.instance = layout, instance
        self.incarnation = new_incarnation()
        self._host = HostPool(layout.pool_bytes)
        self.memory: Bytes = np.frombuffer(self._host.buffer(), np.uint8)[: layout.pool_bytes]
        self.core: HoldingCore = create_core(layout, implementation)
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
            self._node = Node(
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
        """Hang up and give the memory back; views of it must not be used any more."""
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
        """Get empty pages.

        :param tokens: for a text of so many tokens, in every layer group what a request needs
            that goes on behind it (of a window its end, one state).
        :param pages: or so many of each group, by the group's name.
        :param seconds: until they are given back by themselves.
        :raises ChangeSomething: if neither or both are given, or a group is unknown.
        :raises TryLater: if there are too few; what is cached has made way already.
        """
        firsts, counts = self._counts(tokens, pages, model).T

        def held() -> Lease:
            owner, deadline = self._owner("alloc"), self._deadline(seconds)
            hold = self._agent.holds.hold_pages(owner, deadline, counts, model=model)
            if hold is None:
                raise TryLater(f"too few pages are empty or only cached for {counts.tolist()}")
            return self._lease(hold, firsts)

        return self._node.ask(held)

    def free_mem(self, lease: Lease) -> bool:
        """Give a lease's pages back; idempotent.  Whether they were still held."""

        def freed() -> bool:
            was_held = self._agent.holds.release(lease.owner)
            self._sweep()
            return was_held

        return self._node.ask(freed)

    def view(self, address: Address) -> npt.NDArray[np.uint8]:
        """The bytes of an own page, to read and to write while its lease lasts.

        :raises ChangeSomething: if it is another instance's, or an earlier incarnation's.
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
        """Cache a text whose KV was written to the pages of a lease, which ends.

        :param root: texts share prefixes only within one root.
        :raises TryLater: if the lease is over.
        :raises ChangeSomething: if its pages are not as many as the text takes.
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
        """Hold the longest cached prefix that every layer group can be resumed from.

        Its ``hit_tokens`` may be 0; then it has no addresses.

        :param media: where to look: ``device``, the pool; ``host``, what was swapped out; or
            ``mixed``, each page in either.  Addresses say which.
        """
        if media != "device":
            return self._match_tiers(tokens, root, model, seconds, media)

        def matched() -> Lease:
            owner, deadline = self._owner("match"), self._deadline(seconds)
            return self._lease(
                self._agent.holds.hold_text(owner, deadline, whole(tokens), root, model=model)
            )

        return self._node.ask(matched)

    def delete(self, tokens: Sequence[int], *, root: str = "", model: str = "") -> int:
        """Forget what is cached of a text alone; returns the number of pages.

        What other texts share with it, and what is held, stays.
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
        """For each group the first position and the number of pages [groups, 2]."""
        if (tokens is None) == (pages is None):
            raise ChangeSomething("tokens", tokens, "or pages must be given", "give one of them")
        if tokens is not None:
            return pages_of_text(self.layout, tokens, model=model)
        assert pages is not None
        names = [group.name for group in self.layout.groups]
        for name in pages:
            if name not in names:
                remedy = f"use {', '.join(names)}"
                raise ChangeSomething("pages", name, "is no layer group", remedy)
        return np.asarray([(0, pages.get(name, 0)) for name in names], np.int32)

    def _require(self, lease: Lease) -> None:
        if lease.owner not in self._agent.holds:
            raise TryLater("the lease is over: its pages may be somebody else's")
