"""Where states are worth keeping: which cuts a request makes, and what each may displace.

A state stands for all tokens before it, so a state group can be resumed only where a
state was kept.  Most are kept only while memory is idle.  Where a prompt ends, at
waypoints before its end, where a turn ends and where a prompt parts from what was known,
a state (or a window's pages) counts like any cached page, as long as such states are used
again; and it may displace older pages if the tokens it saves are worth its bytes.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import count, takewhile

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.eviction.evictor import COARSE, NORMAL, SPARE

FIRST_CUTS = (64, 128, 256)
"""Prefixes as short as system prompts …"""
CUT_TOKENS = 512
"""… and then every so many tokens; the last of them is the prompt's end."""
COARSE_TOKENS = 2048
"""Of those on the way, the ones that stay longest: few, for prompts that share anything."""
END_TOKENS = 64
"""A last cut close to a prompt's end."""
LAST_WAYPOINT_TOKENS = 16384
"""The last waypoint is 2,048 to so many tokens before a prompt's end, the others twice, four times
… as many: what parts from a prompt in its midst finds at least half of how far it is known …"""
WAYPOINT_PART = 4
"""… if one takes a fourth of what those tokens take, or of what the prompt's end does."""
DEAR_WAYPOINT_TOKENS = 8192
"""Where even that one would take more, it lies so many tokens before the end …"""
DEAR_PART = 10
"""… of prompts whose keys and values take ten times as much."""
WORTH_TOKENS = 512
"""A state that saves so many tokens may always displace …"""
WORTH_PART = 4
"""… and one that saves a fourth of the tokens whose keys and values fill as many bytes."""
USED_PART = 8
"""States of a sort count like other pages while one in so many is used before it is evicted."""
TRIAL = 64
"""So many prompt ends may be evicted unused, whatever comes of the others …"""
TURN_TRIAL = 16
"""… and so many turn ends kept: the first answers that nobody sends again show early."""
MEMORY = 256
"""After so many of a sort, what was seen counts half."""


class Sort(IntEnum):
    """Why a state (or a page that a request left half full) is kept; BRANCH: proved useful."""

    FINE = 0
    COARSE = 1
    WAYPOINT = 2
    PROMPT_END = 3
    BRANCH = 4
    TURN_END = 5


class Usefulness:
    """How many states of each sort were used again, and how many were wasted: prompt ends that
    were evicted unused, turn ends that were kept.

    Only those that counted like other pages are judged: of what goes first in any case, its
    eviction says nothing.
    """

    def __init__(self) -> None:
        self._used = [0] * len(Sort)
        self._wasted = [0] * len(Sort)

    def note_used(self, sort: Sort) -> None:
        """A request resumed from one, for the first time."""
        self._used[sort] += 1

    def note_wasted(self, sort: Sort, rank: int) -> None:
        """One proved useless, or was kept on trial."""
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
        if sort in (Sort.WAYPOINT, Sort.BRANCH):
            return NORMAL
        trial = TURN_TRIAL if sort is Sort.TURN_END else TRIAL
        return NORMAL if self._used[sort] * USED_PART + trial >= self._wasted[sort] else SPARE


def cuts(
    start: int,
    end: int,
    prompt_tokens: int,
    matched_tokens: int,
    alignment: int,
    nearest_tokens: int = 0,
) -> list[tuple[int, Sort]]:
    """Cuts in (start, end] of a request's prefill, and why.

    :param matched_tokens: how far the index knew the prompt: where it branches off.
    :param nearest_tokens: see :func:`waypoint_tokens`.
    :param alignment: cuts are multiples of it, so that attention's pages end there too.
    """
    sorts = {_aligned(cut, alignment): Sort.FINE for cut in _on_the_way(start, end + alignment)}
    sorts[_aligned(prompt_tokens // END_TOKENS * END_TOKENS, alignment)] = Sort.FINE
    for cut in range(start // COARSE_TOKENS * COARSE_TOKENS, end + alignment, COARSE_TOKENS):
        sorts[_aligned(cut, alignment)] = Sort.COARSE
    for way in waypoints(prompt_tokens, alignment, nearest_tokens):
        sorts[way] = Sort.WAYPOINT
    sorts[prompt_end(prompt_tokens, alignment)] = Sort.PROMPT_END
    sorts[_aligned(matched_tokens, alignment)] = Sort.BRANCH
    return [(cut, sort) for cut, sort in sorted(sorts.items()) if start < cut <= end]


def prompt_end(prompt_tokens: int, alignment: int) -> int:
    """The cut that stands for a prompt's end: its last multiple of 512, or of 64 below that."""
    unit = CUT_TOKENS if prompt_tokens >= CUT_TOKENS else END_TOKENS
    return _aligned(prompt_tokens // unit * unit, alignment)


def waypoints(prompt_tokens: int, alignment: int, nearest_tokens: int) -> list[int]:
    """Lengths on the way of a prompt that are kept like its end; the longest first."""
    end = prompt_end(prompt_tokens, alignment)
    if not nearest_tokens:
        return []
    lengths = takewhile(
        lambda length: length >= nearest_tokens, (end - (nearest_tokens << i) for i in count())
    )
    return [_aligned(length // CUT_TOKENS * CUT_TOKENS, alignment) for length in lengths]


def waypoint_tokens(groups: Sequence[GroupSpec], alignment: int, prompt_tokens: int) -> int:
    """Tokens from a prompt's end to its last waypoint; 0 if it is to keep none.

    :param groups: of one model; ``alignment`` tokens are whole pages in each of them.
    """
    token_bytes, end_bytes = _token_bytes(groups, alignment), _resume_bytes(groups, alignment, None)
    if not token_bytes or not end_bytes:
        return 0
    tokens = COARSE_TOKENS
    while tokens <= LAST_WAYPOINT_TOKENS:
        taken = _resume_bytes(groups, alignment, tokens) * WAYPOINT_PART
        if taken <= max(tokens * token_bytes, end_bytes):
            return tokens
        tokens *= 2
    return DEAR_WAYPOINT_TOKENS if prompt_tokens * token_bytes >= end_bytes * DEAR_PART else 0


def waypoints_overlap(groups: Sequence[GroupSpec], alignment: int, nearest_tokens: int) -> bool:
    """Does one take more than a fourth of its tokens, since neighbours' windows are the same pages?

    Together they then are most of what a window leaves behind.

    :param nearest_tokens: see :func:`waypoint_tokens`.
    """
    if not 0 < nearest_tokens <= LAST_WAYPOINT_TOKENS:
        return False
    taken = _resume_bytes(groups, alignment, nearest_tokens) * WAYPOINT_PART
    end_bytes = _resume_bytes(groups, alignment, None)
    return nearest_tokens * _token_bytes(groups, alignment) < taken <= end_bytes


def _token_bytes(groups: Sequence[GroupSpec], alignment: int) -> int:
    """``alignment`` times the bytes of a token's keys and values."""
    return sum(
        alignment // group.page_tokens * group.page_stride_bytes
        for group in groups
        if group.kind is GroupKind.FULL
    )


def _resume_bytes(groups: Sequence[GroupSpec], alignment: int, tokens: int | None) -> int:
    """``alignment`` times the bytes of what one resumes from; of a sliding window at most
    ``tokens``, since those of neighbours overlap."""
    found = 0
    for group in groups:
        if group.kind is GroupKind.STATE:
            found += alignment * group.page_stride_bytes * group.slices
        elif group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED):
            slides = tokens is not None and group.kind is GroupKind.SLIDING
            window = min(group.window_tokens, tokens or 0) if slides else group.window_tokens
            found += alignment // group.page_tokens * group.page_stride_bytes * window
    return found


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
