"""One lookup over both tiers: where a text's pages are, and at which lengths it can be resumed.

::

    group      page 0  page 1  page 2  page 3      the pool's index says what it names along the
    full       pool    pool    buffer  buffer      text, the buffer is asked for what is missing
    sliding    -       -       buffer  pool
                                          └── a hit: every page that is needed is somewhere

The pool's rule decides (``prefix/index/hits.py``): whole pages, and where a text ended, its
half-full pages and states.  Of pages that a text shares in part alone only the pool knows.
"""

from collections.abc import Iterator, Sequence
from math import lcm

import numpy as np
import numpy.typing as npt

from kvell.cost.swap_rule import WAYS, SwapRule
from kvell.memory import GroupKind, GroupPolicy, Ints, policy_of
from kvell.mempool.tiers.buffered import BufferedPages, Key, Place, is_mark, key, needed
from kvell.mempool.tiers.digests import PrefixDigests

SERVED_KINDS = frozenset({GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.STATE})
"""Kinds whose pages hold all there is of the tokens before them."""

LongInts = npt.NDArray[np.int64]


class Tiers:
    """The pages of one text.

    :param own: the groups of its model, all of ``SERVED_KINDS``.
    :param known: what the pool's index names along it, as :meth:`.MemoryCore.known` says.
    :ivar lengths: at which a request can be resumed, all but the last token at most; ascending.
    :ivar copied_bytes: what the pool lacks of each of them.
    """

    def __init__(
        self, pages: BufferedPages, own: Sequence[int], digests: PrefixDigests, known: Ints
    ) -> None:
        self._buffer, self._own, self._digests = pages, own, digests
        self._groups = pages.groups
        self._pool = self._places_of(known)
        self._most = len(digests) - 1
        for index in own:
            if self._groups[index].kind is GroupKind.FULL:
                self._most = min(self._most, self._reach(index))
        self.lengths, self.copied_bytes = self._resumable()

    @property
    def longest(self) -> int:
        """The longest length; 0 if there is none."""
        return int(self.lengths[-1]) if len(self.lengths) else 0

    def best(self, hit: int, rule: SwapRule) -> int:
        """The length that is best to resume at, beyond a hit of the pool alone; or ``hit``.

        A longer one is better where the rule says that its further bytes are copied sooner than
        its further tokens are computed.
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
        """(group, position, place) of every page that is needed at a length."""
        for index in self._own:
            for position, place in needed(self._groups[index], length):
                yield index, position, place

    def pool_page(self, group: int, place: Place) -> int | None:
        """The pool's page at a place; None if it has none."""
        return self._pool[group].get(place)

    def key(self, group: int, place: Place) -> Key:
        """The buffer's key for a place."""
        return key(group, place, self._digests)

    def is_buffered(self, group: int, place: Place) -> bool:
        """Whether the buffer has the page."""
        return self.key(group, place) in self._buffer

    # ----------------------------------------------------------------------- internal

    def _places_of(self, known: Ints) -> dict[int, dict[Place, int]]:
        places: dict[int, dict[Place, int]] = {index: {} for index in self._own}
        for index, position, page, end in known.tolist():
            part = position if self._groups[index].kind is GroupKind.STATE else 0
            places[index][end, part] = page
        return places

    def _has(self, group: int, place: Place) -> bool:
        return place in self._pool[group] or self.is_buffered(group, place)

    def _reach(self, index: int) -> int:
        """Tokens of which a group of full attention has all whole pages, and part of the next."""
        size = self._groups[index].page_tokens
        ends = range(size, self._most + 1, size)
        hole = next((end for end in ends if not self._has(index, (end, 0))), None)
        return self._most if hole is None else hole - 1

    def _candidates(self) -> LongInts:
        own = [self._groups[index] for index in self._own]
        marks = {
            end
            for index, places in self._pool.items()
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
        is_there, copied_bytes = np.ones(len(lengths), bool), np.zeros(len(lengths), np.int64)
        for index in self._own if len(lengths) else ():
            group = self._groups[index]
            if group.kind is GroupKind.STATE:
                continue
            absent, copied = self._whole(index)
            first = _starts(policy_of(group), lengths) // group.page_tokens
            last = lengths // group.page_tokens
            is_there &= absent[last] == absent[first]
            copied_bytes += (copied[last] - copied[first]) * group.page_stride_bytes
        for at in np.flatnonzero(is_there).tolist():
            size_bytes = self._end_bytes(int(lengths[at]))
            is_there[at] = size_bytes is not None
            copied_bytes[at] += size_bytes or 0
        return lengths[is_there], copied_bytes[is_there]

    def _whole(self, index: int) -> tuple[LongInts, LongInts]:
        """Whole pages before each position that are nowhere, and those in the buffer alone."""
        size = self._groups[index].page_tokens
        count = self._most // size
        absent, copied = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
        for at in range(count):
            place = ((at + 1) * size, 0)
            if place in self._pool[index]:
                continue
            is_buffered = self.is_buffered(index, place)
            copied[at + 1], absent[at + 1] = is_buffered, not is_buffered
        return absent.cumsum(), copied.cumsum()

    def _end_bytes(self, length: int) -> int | None:
        """Bytes to copy of states and half-full pages that end there; None if one is nowhere."""
        size_bytes = 0
        for index in self._own:
            group = self._groups[index]
            if not is_mark(group, length):
                continue
            parts = group.slices if group.kind is GroupKind.STATE else 1
            for place in ((length, part) for part in range(parts)):
                if place in self._pool[index]:
                    continue
                if not self.is_buffered(index, place):
                    return None
                size_bytes += group.page_stride_bytes
        return size_bytes


def _starts(policy: GroupPolicy, lengths: LongInts) -> LongInts:
    """The first token that is read behind each length."""
    return np.fromiter((policy.active_start(length) for length in lengths.tolist()), np.int64)


def _kinks(lengths: LongInts, sizes_bytes: LongInts) -> list[tuple[int, int]]:
    """The lengths and bytes between which a page costs the same: the best is one of them."""
    pairs: list[tuple[int, int]] = list(zip(lengths.tolist(), sizes_bytes.tolist(), strict=True))
    kept = pairs[:1]
    for before, here, after in zip(pairs, pairs[1:], pairs[2:], strict=False):
        left = (here[1] - before[1]) * (after[0] - here[0])
        right = (after[1] - here[1]) * (here[0] - before[0])
        if left != right:
            kept.append(here)
    return [*kept, *pairs[1:][-1:]]
