"""Where states are worth keeping: which cuts a request makes, and what each may displace.

A state stands for all tokens before it, so a state group can be resumed only where a
state was kept.  Most are kept only while memory is idle.  Where a prompt ends, where a
turn ends and where a prompt parts from what was known, a state counts like any cached
page, as long as such states are used again; and it may displace older pages if the
tokens it saves are worth its bytes.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.evictor import COARSE, NORMAL, SPARE

FIRST_CUTS = (64, 128, 256)
"""Prefixes as short as system prompts …"""
CUT_TOKENS = 512
"""… and then every so many tokens; the last of them is the prompt's end."""
COARSE_TOKENS = 2048
"""Of those on the way, the ones that stay longest: few, for prompts that share anything."""
END_TOKENS = 64
"""A last cut close to a prompt's end."""
WORTH_TOKENS = 512
"""A state that saves so many tokens may always displace …"""
WORTH_PART = 4
"""… and one that saves a fourth of the tokens whose keys and values fill as many bytes."""
USED_PART = 8
"""States of a sort count like other pages while one in so many is used before it is evicted."""
TRIAL = 64
"""So many of a sort may be evicted unused, whatever comes of the others."""
MEMORY = 256
"""After so many of a sort, what was seen counts half."""


class Sort(IntEnum):
    """Why a state (or a page that a request left half full) is kept; BRANCH: proved useful."""

    FINE = 0
    COARSE = 1
    PROMPT_END = 2
    BRANCH = 3
    TURN_END = 4


class Usefulness:
    """How many states of each sort were used again, and how many were evicted unused.

    Only those that counted like other pages are judged by their eviction: of what goes
    first in any case, it says nothing.
    """

    def __init__(self) -> None:
        self._used = [0] * len(Sort)
        self._wasted = [0] * len(Sort)

    def note_used(self, sort: Sort) -> None:
        """A request resumed from one, for the first time."""
        self._used[sort] += 1

    def note_evicted(self, sort: Sort, rank: int) -> None:
        """One was evicted that nobody had used."""
        if rank != NORMAL:
            return
        self._wasted[sort] += 1
        if self._wasted[sort] >= MEMORY:
            self._used[sort] //= 2
            self._wasted[sort] //= 2

    def rank(self, sort: Sort) -> int:
        """Eviction rank of a state of this sort."""
        if sort in (Sort.FINE, Sort.COARSE):
            return SPARE if sort is Sort.FINE else COARSE
        is_used = self._used[sort] * USED_PART + TRIAL >= self._wasted[sort]
        return NORMAL if is_used or sort is Sort.BRANCH else SPARE


def cuts(
    start: int, end: int, prompt_tokens: int, matched_tokens: int, alignment: int
) -> list[tuple[int, Sort]]:
    """Cuts in (start, end] of a request's prefill, and why.

    :param matched_tokens: how far the index knew the prompt: where it branches off.
    :param alignment: cuts are multiples of it, so that attention's pages end there too.
    """
    sorts = {_aligned(cut, alignment): Sort.FINE for cut in _on_the_way(start, end + alignment)}
    sorts[_aligned(prompt_tokens // END_TOKENS * END_TOKENS, alignment)] = Sort.FINE
    for cut in range(start // COARSE_TOKENS * COARSE_TOKENS, end + alignment, COARSE_TOKENS):
        sorts[_aligned(cut, alignment)] = Sort.COARSE
    sorts[prompt_end(prompt_tokens, alignment)] = Sort.PROMPT_END
    sorts[_aligned(matched_tokens, alignment)] = Sort.BRANCH
    return [(cut, sort) for cut, sort in sorted(sorts.items()) if start < cut <= end]


def prompt_end(prompt_tokens: int, alignment: int) -> int:
    """The cut that stands for a prompt's end: its last multiple of 512, or of 64 below that."""
    unit = CUT_TOKENS if prompt_tokens >= CUT_TOKENS else END_TOKENS
    return _aligned(prompt_tokens // unit * unit, alignment)


def is_worth_displacing(group: GroupSpec, groups: Sequence[GroupSpec], saved_tokens: int) -> bool:
    """May a state that saves ``saved_tokens`` displace what was used longer ago?"""
    state_bytes = group.page_stride_bytes * group.slices
    token_bytes = sum(
        other.page_stride_bytes / other.page_tokens
        for other in groups
        if other.kind is GroupKind.FULL
    )
    return saved_tokens >= WORTH_TOKENS or saved_tokens * token_bytes * WORTH_PART >= state_bytes


def _on_the_way(start: int, end: int) -> Iterator[int]:
    yield from FIRST_CUTS
    yield from range(start // CUT_TOKENS * CUT_TOKENS, end + 1, CUT_TOKENS)


def _aligned(cut: int, alignment: int) -> int:
    return cut // alignment * alignment
