"""The pool's calls (MemServe, Table 1), for programs that keep KV memory without an engine.

::

    with MemPool(layout, instance="a", address=Path("/tmp/a")) as a, …:
        lease = a.alloc_mem(tokens=100)
        a.view(lease.addresses[0])[:] = …
        a.insert(tokens, lease)
        a.connect(Path("/tmp/b"))
        a.transfer_with_insert("b", tokens)
"""

import queue
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
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
from kvell.mempool.entries import PeerEntry
from kvell.mempool.holds import Hold
from kvell.mempool.node import News, Node
from kvell.mempool.owners import HoldKind, Owner
from kvell.mempool.transfers.actions import Action, Arrived, Ended
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.receiving import owner_of
from kvell.mempool.transports.page_copies import Bytes

LEASE_SECONDS = 30.0
TRANSFER_SECONDS = 30.0
NO_TOKEN = np.iinfo(np.int32).min
"""Stands behind a text that is matched: at most all but the last token of what is asked are
found, and here all may be."""


class MemPool:
    """KV memory of one instance, which others of the same host can be connected to.

    :param layout: of :func:`kvell.memory.plan_layout`; instances with equal groups may exchange
        pages, whatever the sizes of their pools.
    :param content: what else decides the bytes of a page: weights, element types.
    :param address: a path for the socket at which others connect; None: none can.
    :param secret: which all instances of the cluster know.
    :raises ChangeSomething: when the system refuses so much memory, or the address cannot be bound.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        instance: str,
        content: str = "",
        address: Path | None = None,
        secret: bytes = b"",
        implementation: Implementation = "auto",
    ) -> None:
        self.layout, self.instance = layout, instance
        self.incarnation = secrets.randbits(48)
        self._host = HostPool(layout.pool_bytes)
        self.memory: Bytes = np.frombuffer(self._host.buffer(), np.uint8)[: layout.pool_bytes]
        self.core: HoldingCore = create_core(layout, implementation)
        self._agent = Agent(self.core, instance, self.incarnation, content)
        self._arrivals: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._operation = 0
        self._sent: dict[Transfer, tuple[Owner, Future[None]]] = {}
        try:
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
        return self._node.ask(lambda: self._agent.holds.release(lease.owner))

    def view(self, address: Address) -> npt.NDArray[np.uint8]:
        """The bytes of an own page, to read and to write while its lease lasts.

        :raises ChangeSomething: if it is another instance's, or an earlier incarnation's.
        """
        if (address.instance, address.incarnation) != (self.instance, self.incarnation):
            problem, remedy = "is not of this instance", "transfer it here first"
            raise ChangeSomething("address", address, problem, remedy)
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
    ) -> Lease:
        """Hold the longest cached prefix that every layer group can be resumed from.

        Its ``hit_tokens`` may be 0; then it has no addresses.
        """

        def matched() -> Lease:
            owner, deadline = self._owner("match"), self._deadline(seconds)
            return self._lease(
                self._agent.holds.hold_text(owner, deadline, _asked(tokens), root, model=model)
            )

        return self._node.ask(matched)

    def delete(self, tokens: Sequence[int], *, root: str = "", model: str = "") -> int:
        """Forget what is cached of a text alone; returns the number of pages.

        What other texts share with it, and what is held, stays.
        """
        text = np.asarray(tokens, np.int32)
        return self._node.ask(lambda: self.core.delete(text, root, model=model))

    # ------------------------------------------------------------------ transfer

    def connect(self, address: Path) -> str:
        """Connect to another instance of this host; returns its name.

        :raises TryLater: when nobody answers there.
        :raises ChangeSomething: when it is no instance of this cluster.
        """
        return self._node.connect(address)

    def peers(self) -> list[str]:
        """Instances that are connected."""
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
        """Send what is cached of a text; the receiver's user gets it from :meth:`next_arrival`.

        The receiver takes what it has itself and allocates the rest; only that crosses.

        :returns: tokens that it has now.
        :raises ChangeSomething: if nothing of the text is cached here.
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
        """Send what is cached of a text; the receiver caches it too.  See :meth:`transfer`."""
        return self._transfer(instance, tokens, root, model, private, seconds, inserts=True)

    def next_arrival(
        self, seconds: float, lease_seconds: float = LEASE_SECONDS
    ) -> tuple[Lease, bytes]:
        """Wait for a text that was sent without insertion; returns its pages and what came along.

        :raises TryLater: if none comes in time.
        """
        ends = self._deadline(seconds)

        def leased(arrived: Arrived) -> Lease | None:
            owner = owner_of(arrived.transfer)
            if owner not in self._agent.holds:
                return None  # nobody asked for it in time
            hold = self._agent.holds[owner]
            hold.deadline = self._deadline(lease_seconds)
            hold.hit_tokens = arrived.computed
            return self._lease(hold)

        while True:
            left_seconds = max(0.0, (ends - self._node.now()) / 1000)
            try:
                arrived = self._arrivals.get(timeout=left_seconds)
            except queue.Empty:
                raise TryLater(f"no text came within {seconds:g} s") from None
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
            owner, now = self._owner("departure"), self._node.now()
            deadline = self._deadline(seconds)
            hold = self._agent.holds.hold_text(owner, deadline, _asked(tokens), root, model=model)
            if not hold.hit_tokens:
                self._agent.holds.release(owner)
                remedy = "insert it first"
                raise ChangeSomething("tokens", f"{len(tokens)} tokens", "are not cached", remedy)
            sending = self._agent.sending
            transfer, actions = sending.begin(
                instance,
                hold.tokens,
                hold.hit_tokens,
                now,
                deadline,
                root=root,
                model=model,
                inserts=inserts,
                private=private,
            )
            done: Future[None] = Future()
            self._sent[transfer] = owner, done
            actions += sending.ready(transfer, self._agent.holds.places(owner))
            self._node.act(actions)
            self._node.wake_at(self._agent.next_deadline)
            return done, hold.hit_tokens

        done, computed = self._node.ask(begun)
        done.result()
        return computed

    def _handled(self, entry: PeerEntry) -> list[Action]:
        actions = self._agent.handle(entry)
        self._node.wake_at(self._agent.next_deadline)
        return actions

    def _told(self, news: News) -> None:
        if isinstance(news, Arrived):
            if owner_of(news.transfer) in self._agent.holds:
                self._arrivals.put(news)
        elif isinstance(news, Ended):
            owner, done = self._sent.pop(news.transfer)
            self._agent.holds.release(owner)
            if news.problem:
                done.set_exception(TryLater(f"the transfer ended: {news.problem}"))
            else:
                done.set_result(None)

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

    def _owner(self, kind: HoldKind) -> Owner:
        self._operation += 1
        return Owner(kind, self.instance, self.incarnation, self._operation)

    def _deadline(self, seconds: float) -> int:
        return self._node.now() + int(seconds * 1000)

    def _require(self, lease: Lease) -> None:
        if lease.owner not in self._agent.holds:
            raise TryLater("the lease is over: its pages may be somebody else's")

    def _lease(self, hold: Hold, firsts: Ints | None = None) -> Lease:
        self._node.wake_at(self._agent.next_deadline)
        groups = self.layout.groups
        before = [0] * len(groups) if firsts is None else firsts.tolist()
        addresses = tuple(
            Address(
                self.instance,
                self.incarnation,
                group,
                before[group] + position,
                page,
                page * groups[group].page_stride_bytes,
            )
            for group, position, page in self._agent.holds.pages(hold.owner).tolist()
        )
        return Lease(hold.owner, hold.deadline, addresses, hold.hit_tokens)


def _asked(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.append(np.asarray(tokens, np.int32), np.int32(NO_TOKEN))
