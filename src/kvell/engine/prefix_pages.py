"""Pages of cached prefixes in the CPU buffer, by the tokens that they end with; and who reads what.

A page's name is the digest of all tokens up to its end, so prefixes that begin alike share pages.
Prefixes end where a page of every group does; a state serves the length that it was kept at.  The
longest unused page goes first; of one prefix its end.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.plan import NewPages
from kvell.engine.prefix_digests import Digest, PrefixDigests
from kvell.memory import GroupKind, GroupSpec, policy_of

FIRST_HOLDER = 1 << 40
"""Names of holders here; those of preempted requests are below."""

Key = tuple[int, int, Digest]
"""Group; slice of a state, else 0; digest of the tokens that end with the page."""


@dataclass
class _Page:
    """A page of the buffer.

    :param end: of a state, the tokens that it stands for; else 0.
    :param used: the last plan that copied it.
    """

    holder: int
    page: int
    end: int
    used: int


class PrefixPages:
    """An index over a part of the buffer.

    :ivar version: changes when pages come or go.
    """

    def __init__(self, groups: Sequence[GroupSpec], buffer: PageBuffer) -> None:
        self.version = 0
        self._groups, self._buffer = groups, buffer
        self._pages: OrderedDict[Key, _Page] = OrderedDict()
        self._ends: dict[int, int] = {}
        self._next_holder = FIRST_HOLDER
        self._plan = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def begin(self) -> None:
        """A plan is made: what it copies must stay until it has run."""
        self._plan += 1

    def key(
        self, group: int, position: int, length: int, digests: PrefixDigests
    ) -> tuple[Key, int]:
        """Of a page of a prefix of ``length`` tokens; and ``length`` for a state, else 0."""
        spec = self._groups[group]
        if not spec.kind.counts_tokens:
            return (group, position, digests.of(length)), length
        return (group, 0, digests.of((position + 1) * spec.page_tokens)), 0

    def step(self, own: Sequence[int]) -> int:
        """Prefixes of some groups end at multiples of so many tokens."""
        kinds = (self._groups[index] for index in own)
        return lcm(*(spec.page_tokens for spec in kinds if spec.kind.counts_tokens))

    # ---------------------------------------------------------------- coming and going

    def put(self, key: Key, end: int) -> int | None:
        """A page of the buffer for a page that is not here; None if there is no room.

        :param end: as :meth:`key` gives it.
        """
        need = [0] * len(self._groups)
        need[key[0]] = 1
        self.make_room(need)
        pages = self._buffer.hold(self._next_holder, need)
        if pages is None:
            return None
        [page] = pages[key[0]]
        self._pages[key] = _Page(self._next_holder, page, end, self._plan)
        self._next_holder += 1
        self.version += 1
        if end:
            self._ends[end] = self._ends.get(end, 0) + 1
        return page

    def page(self, key: Key) -> int:
        """Where a page is in the buffer.

        :raises KeyError: if it is not there.
        """
        return self._pages[key].page

    def touch(self, keys: Iterable[Key]) -> None:
        """They are used now, the last of them latest."""
        for key in keys:
            if key in self._pages:
                self._pages.move_to_end(key)
                self._pages[key].used = self._plan

    def make_room(self, need: Sequence[int]) -> None:
        """Let pages go until so many of each group fit, or none may go any more."""
        while not self._buffer.has_room(need):
            key = next(iter(self._pages), None)
            if key is None or self._pages[key].used == self._plan:
                return
            self._drop(key)

    def clear(self) -> None:
        """Nothing is kept any more."""
        for key in list(self._pages):
            self._drop(key)

    def _drop(self, key: Key) -> None:
        gone = self._pages.pop(key)
        self._buffer.drop(gone.holder)
        self.version += 1
        if gone.end:
            self._ends[gone.end] -= 1
            if not self._ends[gone.end]:
                del self._ends[gone.end]

    # ---------------------------------------------------------------------- looking up

    def longest(self, digests: PrefixDigests, own: Sequence[int]) -> int:
        """The longest beginning of a text whose pages are all here; its last token is left out.

        :param own: the groups that read it.
        """
        most, step = len(digests) - 1, self.step(own)
        whole = {index: self._whole(index, digests, most) for index in own}
        ends: Iterable[int] = range(step, most + 1, step)
        if not all(self._groups[index].kind.counts_tokens for index in own):
            ends = (end for end in self._ends if end <= most and not end % step)
        for end in sorted(ends, reverse=True):
            if all(self._reaches(index, end, whole[index], digests) for index in own):
                return end
        return 0

    def needed(self, own: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
        """(group, position) of all that is read behind the first ``end`` tokens."""
        for index in own:
            spec = self._groups[index]
            if spec.kind.counts_tokens:
                start = policy_of(spec).active_start(end)
                positions = range(start // spec.page_tokens, -(-end // spec.page_tokens))
            else:
                positions = range(spec.slices)
            yield from ((index, position) for position in positions)

    def _whole(self, index: int, digests: PrefixDigests, most: int) -> NewPages:
        """For each position of a group, how many of the pages before it are here, int32 [n + 1]."""
        spec = self._groups[index]
        if not spec.kind.counts_tokens:
            return np.zeros(1, np.int32)
        size = spec.page_tokens
        is_here = np.zeros(most // size + 1, np.int32)
        for position in range(most // size):
            is_here[position + 1] = (index, 0, digests.of((position + 1) * size)) in self._pages
            if not is_here[position + 1] and spec.kind is GroupKind.FULL:
                break
        return np.cumsum(is_here, dtype=np.int32)

    def _reaches(self, index: int, end: int, whole: NewPages, digests: PrefixDigests) -> bool:
        """Has a group all that a request which resumes at ``end`` reads of it?"""
        spec = self._groups[index]
        if not spec.kind.counts_tokens:
            digest = digests.of(end)
            return all((index, part, digest) in self._pages for part in range(spec.slices))
        first, last = policy_of(spec).active_start(end) // spec.page_tokens, end // spec.page_tokens
        return bool(whole[last] - whole[first] == last - first)
