"""The cuts of a request at which states are kept, and the pages that each state may displace.

A state represents all tokens before it, so a state group can resume only where a state was
kept.  Most states are kept only while memory is idle.  At a prompt's end, at waypoints before
it, at a turn's end and where a prompt branches off from an indexed text, a state (or a window's
pages) counts like any cached page, as long as such states are used again.  The state may displace
older pages if the tokens that it saves are worth its bytes.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import count, takewhile

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.eviction.checkpoints import CUT_TOKENS, END_TOKENS, prompt_end
from tests.oracle.eviction.evictor import COARSE, NORMAL, SPARE

FIRST_CUTS = (64, 128, 256)
"""The first cuts of a prompt, for prefixes as short as system prompts."""
COARSE_TOKENS = 2048
"""The distance of coarse cuts: a few that stay longer than the other cuts before a prompt's end."""
LAST_WAYPOINT_TOKENS = 16384
"""The greatest distance of the last waypoint from a prompt's end; the least is 2,048. The others
are 2, 4, … times as far: a prompt that branches off ``n`` tokens before the end recomputes at most
about ``n`` shared tokens."""
WAYPOINT_PART = 4
"""The divisor for a waypoint's bytes: at most a fourth of its tokens' or of the prompt's end's."""
DEAR_WAYPOINT_TOKENS = 8192
"""The distance of the last waypoint if it takes more even at the greatest distance, in prompts
whose keys and values take at least ``DEAR_PART`` times the bytes of the prompt's end."""
DEAR_PART = 10
USED_PART = 8
"""The largest ratio of wasted to used states at which a sort counts like other pages."""
TRIAL = 64
"""The prompt ends that may be evicted unused before that ratio counts."""
TURN_TRIAL = 16
"""The turn ends that may be kept before that ratio counts: answers that no client sends again show
early."""
MEMORY = 256
"""The number of wasted states of a sort at which its counts are halved."""


class Sort(IntEnum):
    """The reason to keep a state (or a partly filled page); BRANCH: it proved useful."""

    FINE = 0
    COARSE = 1
    WAYPOINT = 2
    PROMPT_END = 3
    BRANCH = 4
    TURN_END = 5


class Usefulness:
    """Counts, by sort, of states that were used again and of states that were wasted.

    Wasted are prompt ends that were evicted unused, and turn ends that were kept.  Only states that
    counted like other pages are judged: the eviction of spare states proves nothing.
    """

    def __init__(self) -> None:
        self._used = [0] * len(Sort)
        self._wasted = [0] * len(Sort)

    def note_used(self, sort: Sort) -> None:
        """Count a state from which a request resumed for the first time."""
        self._used[sort] += 1

    def note_wasted(self, sort: Sort, rank: int) -> None:
        """Count a state that proved useless, or was kept on trial."""
        if rank != NORMAL:
            return
        self._wasted[sort] += 1
        if self._wasted[sort] >= MEMORY:
            self._used[sort] //= 2
            self._wasted[sort] //= 2

    def rank(self, sort: Sort) -> int:
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
    """Return the cuts in (start, end] of a request's prefill, each with its sort.

    :param matched_tokens: the indexed part of the prompt, after which it branches off.
    :param nearest_tokens: see :func:`waypoint_tokens`.
    :param alignment: cuts are multiples of it, so that pages of attention end there too.
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


def waypoints(prompt_tokens: int, alignment: int, nearest_tokens: int) -> list[int]:
    """Return the lengths within a prompt that are kept like its end, longest first."""
    end = prompt_end(prompt_tokens, alignment)
    if not nearest_tokens:
        return []
    lengths = takewhile(
        lambda length: length >= nearest_tokens, (end - (nearest_tokens << i) for i in count())
    )
    return [_aligned(length // CUT_TOKENS * CUT_TOKENS, alignment) for length in lengths]


def waypoint_tokens(groups: Sequence[GroupSpec], alignment: int, prompt_tokens: int) -> int:
    """Return the tokens from a prompt's last waypoint to its end; 0 if it keeps no waypoints.

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
    """Return whether a waypoint takes more than a fourth of its tokens' bytes.

    That is allowed if the windows of adjacent waypoints share pages.  Together they are then most
    of the pages that a window releases.

    :param nearest_tokens: see :func:`waypoint_tokens`.
    """
    if not 0 < nearest_tokens <= LAST_WAYPOINT_TOKENS:
        return False
    taken = _resume_bytes(groups, alignment, nearest_tokens) * WAYPOINT_PART
    end_bytes = _resume_bytes(groups, alignment, None)
    return nearest_tokens * _token_bytes(groups, alignment) < taken <= end_bytes


def _token_bytes(groups: Sequence[GroupSpec], alignment: int) -> int:
    """Return ``alignment`` times the bytes of a token's keys and values."""
    return sum(
        alignment // group.page_tokens * group.page_stride_bytes
        for group in groups
        if group.kind is GroupKind.FULL
    )


def _resume_bytes(groups: Sequence[GroupSpec], alignment: int, tokens: int | None) -> int:
    """Return ``alignment`` times the bytes that a resume point needs; of a sliding window at most
    ``tokens`` tokens, since adjacent windows overlap."""
    size = 0
    for group in groups:
        if group.kind is GroupKind.STATE:
            size += alignment * group.page_stride_bytes * group.slices
        elif group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED):
            slides = tokens is not None and group.kind is GroupKind.SLIDING
            window = min(group.window_tokens, tokens or 0) if slides else group.window_tokens
            size += alignment // group.page_tokens * group.page_stride_bytes * window
    return size


def _on_the_way(start: int, end: int) -> Iterator[int]:
    yield from FIRST_CUTS
    yield from range(start // CUT_TOKENS * CUT_TOKENS, end + 1, CUT_TOKENS)


def _aligned(cut: int, alignment: int) -> int:
    return cut // alignment * alignment
