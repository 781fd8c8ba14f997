"""An ideal packer: a memory core that counts needed bytes and knows no pages.

It serves the same calls with the same rules of what a request needs, so it shows what the
same scheduler would do if pages cost nothing: no half-filled page, no hole in a large one.
Nothing is cached: traces whose prompts share something are not what it is for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvell.memory import Facts, GroupKind, GroupSpec, Images, Layout, PoolSnapshot, facts_of
from kvell.memory import policy_of as policy
from kvell.pages.snapshot import PoolTotals
from kvell.prefix.groups.needs import dropped_tokens, end_position, peak_pages, resumed_from
from kvell.prefix.index.radix import Tokens
from kvell.prefix.interface import (
    CHECKPOINT_COLUMNS,
    COPY_COLUMNS,
    NEW_PAGE_COLUMNS,
    SOURCE_COLUMNS,
    Ints,
)


@dataclass
class Held:
    """A holder: tokens computed, and how far it may go in this step."""

    facts: Facts
    groups: tuple[int, ...]
    lease_until: int | None = None
    computed: int = 0
    until: int = 0


class IdealCore:
    """:class:`kvell.memory.MemoryCore` over one counter of bytes, of ``layout``'s size."""

    def __init__(self, layout: Layout) -> None:
        groups = tuple(map(_without_pages, layout.groups))
        self.layout = Layout(groups, 1, layout.pool_bytes, "ideal")
        self._held: dict[int, Held] = {}
        self._last_handle = 0

    def begin_step(self, step: int) -> None:
        """Drop leases that have ended; see :class:`MemoryCore`, here and below."""
        for handle, held in list(self._held.items()):
            if held.lease_until is not None and held.lease_until < step:
                del self._held[handle]

    def register(self, groups: Sequence[GroupSpec]) -> None:
        """Add groups; a counter fits any size."""
        more = tuple(map(_without_pages, groups))
        self.layout = replace(self.layout, groups=(*self.layout.groups, *more))

    def peek(
        self,
        tokens: Tokens,
        root: str,
        *,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int:
        """Nothing is cached."""
        return 0

    def known(self, tokens: Tokens, root: str, *, model: str = "") -> Ints:
        """Nothing is cached."""
        return _no_rows(SOURCE_COLUMNS)

    def delete(self, tokens: Tokens, root: str, *, model: str = "") -> int:
        """Nothing is cached."""
        return 0

    def open(
        self,
        tokens: Tokens,
        root: str,
        lease_until: int | None = None,
        *,
        reuse: bool = True,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int:
        """Open a holder that starts with nothing computed."""
        own = tuple(i for i, group in enumerate(self.layout.groups) if group.model == model)
        self._last_handle += 1
        facts = facts_of(len(tokens), prompt_tokens, images)
        self._held[self._last_handle] = Held(facts, own, lease_until)
        return self._last_handle

    def claim(self, handle: int, expected_tokens: int, *, will_return: bool | None = None) -> None:
        """Turn a lease into a request; expected tokens reserve nothing."""
        self._held[handle].lease_until = None

    def hit_tokens(self, handle: int) -> int:
        """Nothing is cached."""
        return 0

    def receive(self, handle: int, computed: int) -> None:
        """Not supported: nothing is swapped here."""
        raise ValueError("there are no pages to receive")

    def send_away(self, handle: int, away_tokens: int) -> None:
        """Not supported: nobody lends here."""
        raise ValueError("there are no pages to send away")

    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]:
        """Grow holders in order while bytes are free; reports no pages."""
        served = 0
        for handle, length in zip(handles.tolist(), until.tolist(), strict=True):
            if self.largest(handle, length) < length:
                break
            self._held[handle].until = max(length, self._held[handle].until)
            served += 1
        return served, _no_rows(NEW_PAGE_COLUMNS)

    def largest(self, handle: int, until: int) -> int:
        """The longest length that the free bytes allow."""
        held, free_bytes = self._held[handle], self._free_bytes()
        low, high = held.computed, until
        while low < high:
            middle = (low + high + 1) // 2
            enough = self._bytes_of(held, middle) - self._bytes_of(held, held.until) <= free_bytes
            low, high = (middle, high) if enough else (low, middle - 1)
        return low

    def sources(self, handle: int) -> Ints:
        """There are no pages."""
        return _no_rows(SOURCE_COLUMNS)

    def held_pages(self, handle: int) -> Ints:
        """There are no pages."""
        return _no_rows(NEW_PAGE_COLUMNS)

    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool:
        """Whether the free bytes suffice for the worst step of all."""
        more = zip(others.tolist(), others_until.tolist(), strict=True)
        need_bytes = self._peak_bytes(handle, until, chunk_tokens)
        need_bytes += sum(self._peak_bytes(other, length, 1) for other, length in more)
        return need_bytes <= self._free_bytes()

    def may_fit(self) -> bool:
        """Always True: :meth:`fits` is cheap."""
        return True

    def copies(self) -> Ints:
        """There are no pages."""
        return _no_rows(COPY_COLUMNS)

    def checkpoint(self, handles: Ints, until: Ints) -> Ints:
        """Nothing is cached."""
        return _no_rows(CHECKPOINT_COLUMNS)

    def compact(self, most_large: int) -> Ints:
        """There are no holes."""
        return _no_rows(NEW_PAGE_COLUMNS)

    def append(self, handles: Ints, tokens: Ints) -> None:
        """Ignore the token ids."""

    def advance(self, handles: Ints, computed: Ints) -> None:
        """Note computed tokens; what no later step reads is free at once."""
        for handle, length in zip(handles.tolist(), computed.tolist(), strict=True):
            held = self._held[handle]
            held.computed, held.until = length, max(length, held.until)

    def close(self, handle: int, *, renew: bool = True, returns: bool = False) -> None:
        """Free the holder's bytes."""
        del self._held[handle]

    def empty_large_pages(self) -> int:
        """Free bytes; each counts as a large page."""
        return self._free_bytes()

    def evicted_pages(self) -> tuple[int, ...]:
        """Nothing is cached, so nothing is evicted."""
        return (0,) * len(self.layout.groups)

    def totals(self) -> PoolTotals:
        """Used bytes by group, in tokens."""
        none = (0,) * len(self.layout.groups)
        used = [0] * len(none)
        for held in self._held.values():
            for index, units in self._units_of(held, held.until):
                used[index] += units
        return PoolTotals(
            self._free_bytes(), tuple(used), none, none, 0, {}, none, none, none, none
        )

    def snapshot(self) -> PoolSnapshot:
        """A pool without pages."""
        none = (0,) * len(self.layout.groups)
        nothing: tuple[dict[int, tuple[int, int, int]], ...] = tuple({} for _ in none)
        refs: tuple[dict[int, int], ...] = tuple({} for _ in none)
        free = self._free_bytes()
        return PoolSnapshot((), (), (), (), (), refs, nothing, free, none, (), (), 0, none, 0)

    def _free_bytes(self) -> int:
        used = sum(self._bytes_of(held, held.until) for held in self._held.values())
        return self.layout.pool_bytes - used

    def _bytes_of(self, held: Held, until: int) -> int:
        groups = self.layout.groups
        units = self._units_of(held, until)
        return sum(count * groups[index].page_stride_bytes for index, count in units)

    def _units_of(self, held: Held, until: int) -> Iterator[tuple[int, int]]:
        """(group, tokens) that a step from the computed tokens up to ``until`` must hold."""
        for index in held.groups:
            group, facts = self.layout.groups[index], held.facts
            end = end_position(group, facts, until, held.computed)
            if until == held.computed >= facts.prompt_tokens and dropped_tokens(group, facts):
                end = until - dropped_tokens(group, facts)
            yield index, end - resumed_from(group, policy(group), facts, held.computed)

    def _peak_bytes(self, handle: int, until: int, chunk_tokens: int) -> int:
        """Bytes beyond those that the holder has, summed by group."""
        held, groups = self._held[handle], self.layout.groups
        return sum(
            groups[index].page_stride_bytes
            * max(
                0,
                peak_pages(groups[index], held.facts, until, chunk_tokens, held.computed) - units,
            )
            for index, units in self._units_of(held, held.until)
        )


def _without_pages(group: GroupSpec) -> GroupSpec:
    """The group in units of one token, or one whole state, without padding."""
    layers_per_page = 0 if group.kind is GroupKind.STATE else group.layers_per_page
    return replace(
        group,
        page_tokens=1,
        page_stride_bytes=group.token_bytes,
        pages_per_large=1,
        layers_per_page=layers_per_page,
    )


def _no_rows(columns: int) -> Ints:
    return np.empty((0, columns), np.int32)
