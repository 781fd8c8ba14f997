"""One lookup over both tiers for a text's pages and the lengths at which it can be resumed.

::

    group      page 0  page 1  page 2  page 3      the buffer is searched for pages of the text
    full       pool    pool    buffer  buffer      that are not in the pool's index
    sliding    -       -       buffer  pool
                                          └── a hit: every needed page is in one of the tiers

The rule of the pool decides (``csrc/memory/hits.cpp``): a hit has whole pages and, where a text
ended, its partly filled pages and states.  Only the pool matches pages of which a text shares only
the first tokens.
"""

from collections.abc import Iterator, Sequence
from math import lcm

import numpy as np
import numpy.typing as npt

from kvell.cost.swap_rule import WAYS, SwapRule
from kvell.memory import IMAGE_KINDS, GroupKind, GroupSpec, Ints, policy_of
from kvell.mempool.tiers.buffered import BufferedPages, Key, Place, is_mark, key, needed_pages
from kvell.mempool.tiers.digests import PrefixDigests
from kvell.vocabulary import PageId

SERVED_KINDS = frozenset({GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.STATE})
"""The kinds whose pages hold all data of the tokens up to their end."""

LongInts = npt.NDArray[np.int64]


def served_groups(groups: Sequence[GroupSpec], model: str) -> list[int]:
    """Return the groups in which a text of a model without images has pages; none if a page of one
    does not hold all data of its tokens."""
    own = [i for i, g in enumerate(groups) if g.model == model and g.kind not in IMAGE_KINDS]
    return own if all(groups[index].kind in SERVED_KINDS for index in own) else []


class Tiers:
    """The pages of one text.

    :param own: the groups of its model, all of ``SERVED_KINDS``.
    :param indexed: its pages in the pool's index, from :meth:`.MemoryCore.known`.
    :ivar lengths: the lengths at which a request can be resumed, ascending, below the text's.
    :ivar copied_bytes: for each length the bytes that the pool lacks.
    """

    def __init__(
        self, pages: BufferedPages, own: Sequence[int], digests: PrefixDigests, indexed: Ints
    ) -> None:
        self._buffer, self._own, self._digests = pages, own, digests
        self._groups = pages.groups
        self.pool = self._places_of(indexed)
        self._most = len(digests) - 1
        for index in own:
            if self._groups[index].kind is GroupKind.FULL:
                self._most = min(self._most, self._reach(index))
        self.lengths, self.copied_bytes = self._resumable()

    @property
    def longest(self) -> int:
        """The longest length, or 0."""
        return int(self.lengths[-1]) if len(self.lengths) else 0

    def best(self, hit: int, rule: SwapRule) -> int:
        """Return the best length to resume at: ``hit`` of the pool alone, or a longer one.

        A longer length is better if, by the rule, its additional bytes are copied faster than its
        additional tokens are computed.
        """
        beyond = self.lengths > hit
        lengths = np.concatenate([[hit], self.lengths[beyond]])
        sizes_bytes = np.concatenate([[0], self.copied_bytes[beyond]])
        *shorter, best = _kinks(lengths, sizes_bytes)
        for length, size_bytes in reversed(shorter):
            further_bytes = max(0, best[1] - size_bytes)
            if not rule.swaps(best[0] - length, further_bytes // WAYS):
                best = length, size_bytes
        return best[0]

    def places(self, length: int) -> Iterator[tuple[int, int, Place]]:
        """Yield (group, position, place) of every page that a length needs."""
        for index in self._own:
            for position, place in needed_pages(self._groups[index], length):
                yield index, position, place

    def key(self, group: int, place: Place) -> Key:
        return key(group, place, self._digests)

    def is_buffered(self, group: int, place: Place) -> bool:
        return self.key(group, place) in self._buffer

    # ----------------------------------------------------------------------- internal

    def _places_of(self, indexed: Ints) -> dict[int, dict[Place, PageId]]:
        places: dict[int, dict[Place, PageId]] = {index: {} for index in self._own}
        for index, position, page, end in indexed.tolist():
            part = position if self._groups[index].kind is GroupKind.STATE else 0
            places[index][end, part] = page
        return places

    def _reach(self, index: int) -> int:
        """Return the tokens of a group with full attention before the end of its first hole."""
        size = self._groups[index].page_tokens
        ends = range(size, self._most + 1, size)
        cached = self.pool[index]
        hole = next(
            (e for e in ends if (e, 0) not in cached and not self.is_buffered(index, (e, 0))), None
        )
        return self._most if hole is None else hole - 1

    def _candidates(self) -> LongInts:
        own = [self._groups[index] for index in self._own]
        marks = {
            end
            for index, places in self.pool.items()
            for end, _ in places
            if is_mark(self._groups[index], end)
        }
        lengths = {end for end in (*marks, *self._buffer.ends()) if 0 < end <= self._most}
        if all(group.kind is not GroupKind.STATE for group in own):
            step = lcm(*(group.page_tokens for group in own))
            lengths.update(range(step, self._most + 1, step))
        return np.asarray(sorted(lengths), np.int64)

    def _resumable(self) -> tuple[LongInts, LongInts]:
        lengths = self._candidates()
        is_there = np.ones(len(lengths), bool)
        copied_bytes = np.zeros(len(lengths), np.int64)
        for index in self._own if len(lengths) else ():
            group = self._groups[index]
            if group.kind is GroupKind.STATE:
                continue
            absent, copied = self._whole(index)
            starts = (policy_of(group).active_start(length) for length in lengths.tolist())
            first = np.fromiter(starts, np.int64) // group.page_tokens
            last = lengths // group.page_tokens
            is_there &= absent[last] == absent[first]
            copied_bytes += (copied[last] - copied[first]) * group.page_stride_bytes
        for at in np.flatnonzero(is_there).tolist():
            size_bytes = self._end_bytes(int(lengths[at]))
            is_there[at] = size_bytes is not None
            copied_bytes[at] += size_bytes or 0
        return lengths[is_there], copied_bytes[is_there]

    def _whole(self, index: int) -> tuple[LongInts, LongInts]:
        """Return the counts of whole pages before each position in no tier, and only buffered."""
        size = self._groups[index].page_tokens
        count = self._most // size
        absent, copied = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
        for at in range(count):
            place = ((at + 1) * size, 0)
            if place in self.pool[index]:
                continue
            is_buffered = self.is_buffered(index, place)
            copied[at + 1] = is_buffered
            absent[at + 1] = not is_buffered
        return absent.cumsum(), copied.cumsum()

    def _end_bytes(self, length: int) -> int | None:
        """Return the bytes to copy of states and partly filled pages; None if one is in no tier."""
        size_bytes = 0
        for index in self._own:
            group = self._groups[index]
            if not is_mark(group, length):
                continue
            parts = group.slices if group.kind is GroupKind.STATE else 1
            for place in ((length, part) for part in range(parts)):
                if place in self.pool[index]:
                    continue
                if not self.is_buffered(index, place):
                    return None
                size_bytes += group.page_stride_bytes
        return size_bytes


def _kinks(lengths: LongInts, sizes_bytes: LongInts) -> list[tuple[int, int]]:
    """Return the (length, bytes) pairs where the cost of a page changes, among them the best."""
    pairs: list[tuple[int, int]] = list(zip(lengths.tolist(), sizes_bytes.tolist(), strict=True))
    kept = pairs[:1]
    for before, here, after in zip(pairs, pairs[1:], pairs[2:], strict=False):
        left = (here[1] - before[1]) * (after[0] - here[0])
        right = (after[1] - here[1]) * (here[0] - before[0])
        if left != right:
            kept.append(here)
    return [*kept, *pairs[1:][-1:]]
