"""Pages of cached prefixes in the CPU buffer, indexed by the text up to their end.

A page's key has the digest of all tokens up to its end, so prefixes that begin alike share pages.
Prefixes end where a page of every group ends.  Pages are dropped least recently used first; within
a prefix, from its end.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.cpu_buffer.prefix_digests import Digest, PrefixDigests
from kvell.engine.requests.plan import NewPages
from kvell.memory import GroupKind, GroupSpec, policy_of

FIRST_HOLDER = 1 << 40
"""First holder id used here; those of preempted requests are below it."""

Key = tuple[int, Digest]
"""Group; digest of all tokens up to the page's end."""


@dataclass
class _Page:
    """A page of the buffer.

    :param used: the last plan that copied it.
    """

    holder: int
    page: int
    used: int


class PrefixPages:
    """An index of the buffer's pages that hold cached prefixes.

    :ivar version: changes when pages come or go.
    """

    def __init__(self, groups: Sequence[GroupSpec], buffer: PageBuffer) -> None:
        self.version = 0
        self._groups, self._buffer = groups, buffer
        self._pages: OrderedDict[Key, _Page] = OrderedDict()
        self._next_holder = FIRST_HOLDER
        self._plan = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def begin(self) -> None:
        """Begin a plan; pages that it copies stay until it has run."""
        self._plan += 1

    def key(self, group: int, position: int, digests: PrefixDigests) -> Key:
        """The key of a text's page."""
        return group, digests.of((position + 1) * self._groups[group].page_tokens)

    def step(self, own: Sequence[int]) -> int:
        """Prefixes of the groups ``own`` end at multiples of this many tokens."""
        return lcm(*(self._groups[index].page_tokens for index in own))

    # ---------------------------------------------------------------- coming and going

    def put(self, key: Key) -> int | None:
        """Take a page of the buffer for a page that is not in it; None if there is no room."""
        need = [0] * len(self._groups)
        need[key[0]] = 1
        self.make_room(need)
        pages = self._buffer.hold(self._next_holder, need)
        if pages is None:
            return None
        [page] = pages[key[0]]
        self._pages[key] = _Page(self._next_holder, page, self._plan)
        self._next_holder += 1
        self.version += 1
        return page

    def page(self, key: Key) -> int:
        """The page of the buffer that holds a page.

        :raises KeyError: if none does.
        """
        return self._pages[key].page

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark pages as used now, the last of them most recently."""
        for key in keys:
            if key in self._pages:
                self._pages.move_to_end(key)
                self._pages[key].used = self._plan

    def make_room(self, need: Sequence[int]) -> None:
        """Drop pages until ``need`` pages of each group fit, or no more may be dropped."""
        while not self._buffer.has_room(need):
            key = next(iter(self._pages), None)
            if key is None or self._pages[key].used == self._plan:
                return
            self._drop(key)

    def clear(self) -> None:
        """Drop all pages."""
        for key in list(self._pages):
            self._drop(key)

    def _drop(self, key: Key) -> None:
        gone = self._pages.pop(key)
        self._buffer.drop(gone.holder)
        self.version += 1

    # ---------------------------------------------------------------------- looking up

    def longest(self, digests: PrefixDigests, own: Sequence[int]) -> int:
        """Length of a text's longest prefix whose pages are all here, without its last token.

        :param own: the groups that read it.
        """
        most, step = len(digests) - 1, self.step(own)
        whole = {index: self._whole(index, digests, most) for index in own}
        for end in range(most - most % step, 0, -step):
            if all(self._reaches(index, end, whole[index]) for index in own):
                return end
        return 0

    def needed(self, own: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
        """(group, position) of all pages that tokens after the first ``end`` read."""
        for index in own:
            spec = self._groups[index]
            start = policy_of(spec).active_start(end)
            positions = range(start // spec.page_tokens, -(-end // spec.page_tokens))
            yield from ((index, position) for position in positions)

    def _whole(self, index: int, digests: PrefixDigests, most: int) -> NewPages:
        """How many of a group's pages before each position are here, int32 [n + 1]."""
        spec = self._groups[index]
        size = spec.page_tokens
        is_here = np.zeros(most // size + 1, np.int32)
        for position in range(most // size):
            is_here[position + 1] = self.key(index, position, digests) in self._pages
            if not is_here[position + 1] and spec.kind is GroupKind.FULL:
                break
        return np.cumsum(is_here, dtype=np.int32)

    def _reaches(self, index: int, end: int, whole: NewPages) -> bool:
        """Whether all pages of a group that a request resumed at ``end`` reads are here."""
        spec = self._groups[index]
        first, last = policy_of(spec).active_start(end) // spec.page_tokens, end // spec.page_tokens
        return bool(whole[last] - whole[first] == last - first)
