"""The host memory of a library's pool: texts are swapped out and in, and matched in both.

::

             swap_out: copied, and the pool's pages freed unless another user has them
    pool  ◄────────────────────────────────────────────────────────────────────────►  buffer
             swap_in: missing pages are copied and cached in the pool; they stay here too

All calls run on the thread of the memory core.  Instances exchange only pages of pools: a text is
swapped in before it is sent.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from kvell.elastic.page_buffer import PageBuffer
from kvell.errors import ChangeSomething, TryLater
from kvell.memory import HoldingCore, Tokens
from kvell.mempool.holds import Hold, Holds, places_held
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.tiers.buffered import BufferedPages, Key
from kvell.mempool.tiers.digests import Digest, PrefixDigests, full_root
from kvell.mempool.tiers.lookup import SERVED_KINDS, Tiers
from kvell.mempool.transfers.copies import whole
from kvell.mempool.transports.page_copies import Bytes
from kvell.pages.rows import SourceRow
from kvell.vocabulary import PageId

Medium = Literal["device", "host"]
"""The medium of a page: the pool, or the host buffer of a library."""


class Address(NamedTuple):
    """The address of a page of one instance.

    :param group: the index of its layer group; ``position`` is its index in the text.
    :param page: its number in the group; ``offset`` is its start in its medium, in bytes.
    """

    instance: str
    incarnation: int
    group: int
    position: int
    page: PageId
    offset: int
    medium: Medium = "device"


@dataclass(frozen=True)
class Lease:
    """Pages that are held until a deadline.

    :param deadline: in ticks of the instance.
    :param hit_tokens: the matched tokens of a text; 0 for allocated memory.
    """

    owner: Owner
    deadline: Tick
    addresses: tuple[Address, ...]
    hit_tokens: int = 0


Media = Literal["device", "host", "mixed"]
"""The tiers to match a text in: the pool, the buffer, or both together."""
MEDIA: tuple[Media, ...] = get_args(Media)

FoundPage = tuple[Medium, int, int, PageId]
"""The medium, group, position and page number of a page."""


@dataclass(frozen=True)
class _Tiered:
    """The held pages of both tiers: those of the pool by a handle, those of the buffer by keys."""

    handle: int
    keys: tuple[Key, ...]


class HostBuffer:
    """The host buffer of one pool.

    :param holds: the holds of the pool, whose deadlines count here too.
    :param pool: the bytes of the pool, uint8.
    :param size_bytes: the size of host memory, rounded down to whole large pages.
    :raises ChangeSomething: if the size is less than a large page.
    """

    def __init__(self, core: HoldingCore, holds: Holds, pool: Bytes, size_bytes: int) -> None:
        layout = core.layout
        num_large = size_bytes // layout.large_page_bytes
        if num_large < 1:
            problem = f"is less than a large page of {layout.large_page_bytes} bytes"
            remedy = f"use at least {layout.large_page_bytes}"
            raise ChangeSomething("cpu_buffer_bytes", size_bytes, problem, remedy)
        self.memory: Bytes = np.empty(num_large * layout.large_page_bytes, np.uint8)
        self.ledger = PageBuffer(layout.groups, num_large)
        self.pages = BufferedPages(layout.groups, self.ledger)
        self._core, self._holds, self._pool = core, holds, pool
        self._tiered: dict[Owner, _Tiered] = {}
        self._texts: dict[Digest, tuple[Key, ...]] = {}  # by the digest of all of a text
        self._users: Counter[Key] = Counter()

    def swap_out(self, tokens: Tokens, root: str, model: str) -> int:
        """Copy a text's cached pages here, and free its pages in the pool without other users.

        :returns: the number of the text's tokens in the buffer.
        :raises TryLater: if the buffer has too little room; then the text stays in the pool.
        """
        digests, tiers = self._look_up(tokens, root, model)
        length = tiers.longest
        if not length:
            return 0
        places = list(tiers.places(length))
        keys = tuple(tiers.key(group, place) for group, _, place in places)
        self.pages.touch(keys)  # so that none of them evicts another
        taken: list[Key] = []
        for key, (group, _, place) in zip(keys, places, strict=True):
            if key in self.pages:
                continue
            page = tiers.pool[group].get(place)
            held = self.pages.put(group, place, digests)
            if held is None:
                self.pages.forget(taken)
                raise TryLater(f"host memory has too little room for {length} tokens")
            assert page is not None, "what is found is in one tier or the other"
            self.view(group, held)[:] = self._pool_view(group, page)
            taken.append(key)
        self._remember(digests.of(length), keys)
        self.pages.touch(reversed(keys))
        if not self._core.delete(tokens, root, model=model):
            self._core.delete(tokens[:length], root, model=model)
        return length

    def swap_in(self, tokens: Tokens, root: str, model: str) -> int:
        """Copy a text to the pool, cache it there, and return the number of its cached tokens.

        :raises TryLater: if the pool has too little room.
        """
        _, tiers = self._look_up(tokens, root, model)
        handle = self._core.open(whole(tokens), root, model=model)
        hit = self._core.hit_tokens(handle)
        length = tiers.longest
        if length <= hit:
            self._core.close(handle, renew=False)
            return hit
        self._core.receive(handle, length)
        handles, until = np.asarray([handle], np.int32), np.asarray([length], np.int32)
        served, rows = self._core.grow(handles, until)
        if not served:
            self._core.close(handle, renew=False)
            raise TryLater(f"the pool has too little room for {length} tokens")
        for holder, group, source, target in self._core.copies().tolist():
            if holder == handle:
                self._pool_view(group, target)[:] = self._pool_view(group, source)
        given = {(group, position): page for _, group, position, page in rows.tolist()}
        sources = self._core.sources(handle)[:, [SourceRow.GROUP, SourceRow.POSITION]]
        for group, position in map(tuple, sources.tolist()):
            given.pop((group, position), None)
        keys: list[Key] = []
        for group, position, place in tiers.places(length):
            page = given.get((group, position))
            if page is not None:
                keys.append(tiers.key(group, place))
                self._pool_view(group, page)[:] = self.view(group, self.pages.page(keys[-1]))
        self.pages.touch(reversed(keys))
        self._core.advance(handles, until)
        self._core.close(handle)
        return length

    def delete(self, tokens: Tokens, root: str, model: str) -> int:
        """Forget the stored prefixes of a text that are not held, and return the number of freed
        pages; pages that other texts share stay."""
        self._begin()
        digests = PrefixDigests(tokens, full_root(root, model))
        gone = 0
        for end in range(len(tokens), 0, -1) if self._texts else ():
            keys = self._texts.get(digests.of(end), ())
            if not keys or any(key in self.pages.pins for key in keys):
                continue
            del self._texts[digests.of(end)]
            self._users.subtract(keys)
            gone += self.pages.forget(key for key in keys if self._users[key] <= 0)
        self._users = +self._users
        return gone

    def hold(
        self, owner: Owner, deadline: Tick, tokens: Tokens, root: str, model: str, media: Media
    ) -> tuple[Hold, list[FoundPage]]:
        """Hold the longest prefix in the given media until a deadline, and return its pages."""
        _, tiers = self._look_up(tokens, root, model, in_pool=media == "mixed")
        handle = 0
        length = tiers.longest
        if media == "mixed":
            handle = self._core.open(whole(tokens), root, model=model)
            hit = self._core.hit_tokens(handle)
            if hit >= length:
                self._core.close(handle, renew=False)
                hold = self._holds.hold_text(owner, deadline, whole(tokens), root, model=model)
                rows = self._holds.pages(owner).tolist()
                return hold, [("device", group, at, page) for group, at, page in rows]
            self._core.receive(handle, length)
        hold = self._holds.hold_text(owner, deadline, whole(tokens[:0]), root, model=model)
        hold.hit_tokens = length
        in_pool = places_held(self._core, handle) if handle else {}
        pages: list[FoundPage] = []
        keys: list[Key] = []
        for group, position, place in tiers.places(length):
            page = in_pool.get((group, position))
            if page is None:
                keys.append(tiers.key(group, place))
                pages.append(("host", group, position, self.pages.page(keys[-1])))
            else:
                pages.append(("device", group, position, page))
        self.pages.pins.update(keys)
        self.pages.touch(reversed(keys))
        self._tiered[owner] = _Tiered(handle, tuple(keys))
        return hold, pages

    def sweep(self) -> None:
        for owner in [owner for owner in self._tiered if owner not in self._holds]:
            over = self._tiered.pop(owner)
            self.pages.unpin(over.keys)
            if over.handle:
                self._core.close(over.handle, renew=False)

    def view(self, group: int, page: PageId) -> npt.NDArray[np.uint8]:
        size_bytes = self.pages.groups[group].page_stride_bytes
        return self.memory[page * size_bytes : (page + 1) * size_bytes]

    # ----------------------------------------------------------------------- internal

    def _begin(self) -> None:
        self.sweep()
        self.ledger.settle()
        self.pages.begin()

    def _look_up(
        self, tokens: Tokens, root: str, model: str, *, in_pool: bool = True
    ) -> tuple[PrefixDigests, Tiers]:
        """Return the digests and tiers of a text. A hit may cover all of its tokens."""
        self._begin()
        own = [index for index, group in enumerate(self.pages.groups) if group.model == model]
        for group in (self.pages.groups[index] for index in own):
            if group.kind not in SERVED_KINDS or group.is_draft:
                problem = f"has layers whose pages stay in the pool: {group.name}"
                raise ChangeSomething("model", model or "''", problem, "leave its texts there")
        indexed = self._core.known(tokens, root, model=model)
        digests = PrefixDigests(whole(tokens), full_root(root, model))
        return digests, Tiers(self.pages, own, digests, indexed if in_pool else indexed[:0])

    def _pool_view(self, group: int, page: PageId) -> npt.NDArray[np.uint8]:
        size_bytes = self.pages.groups[group].page_stride_bytes
        return self._pool[page * size_bytes : (page + 1) * size_bytes]

    def _remember(self, text: Digest, keys: tuple[Key, ...]) -> None:
        if text not in self._texts:
            self._texts[text] = keys
            self._users.update(keys)
        if len(self._texts) > len(self.pages):
            for gone in [
                t for t, some in self._texts.items() if not any(k in self.pages for k in some)
            ]:
                self._users.subtract(self._texts.pop(gone))
            self._users = +self._users
