"""The pool's calls on its host memory: swaps, and matches in any medium."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvell.errors import ChangeSomething
from kvell.memory import Layout
from kvell.mempool.addresses import Address, Lease, Medium
from kvell.mempool.agent import Agent
from kvell.mempool.buffer import MEDIA, HostBuffer, Media
from kvell.mempool.node import PageTransferThread
from kvell.mempool.owners import HoldKind, Owner, Tick


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
