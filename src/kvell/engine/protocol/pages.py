"""What an instance says of single pages, for people who watch its pool, and why prefixes missed."""

from dataclasses import dataclass
from typing import Literal

from kvell.vocabulary import RequestId

MissReason = Literal["never_seen", "other_salt", "being_computed", "evicted", "not_resumable"]
"""``never_seen``: as far as is remembered, no request had more of the prompt than was hit.
``other_salt``: only requests that share no pages with this one had.  ``being_computed``: another
request was still computing it.  ``evicted``: no group has it any more.  ``not_resumable``: some
groups have it, but not all of them can go on from there."""

MOST_OWNERS = 4
"""Most requests that are named as owners of one large page."""


@dataclass(frozen=True)
class AskPages:
    """Send :class:`Pages` once; it takes time in proportion to the number of large pages."""


@dataclass(frozen=True)
class AskLargePage:
    """Send :class:`LargePage` once."""

    large_page: int


@dataclass(frozen=True)
class PageGroup:
    """A layer group of the pool; ``kind`` is that of its layers."""

    name: str
    kind: str
    layers: int
    page_tokens: int
    page_bytes: int
    pages_per_large: int


@dataclass(frozen=True)
class Miss:
    """A request of which a part of the prompt was not found when it was first admitted.

    :param hit_tokens: that were found.
    :param seen_tokens: that an earlier request had, as far as is remembered and under any salt if
        the reason is ``other_salt``; prefixes are remembered at certain lengths only.
    :param steps_ago: steps since that was seen last; 0 if it never was.
    :param groups: names of those that cannot go on from there, if the reason is ``not_resumable``.
        Empty if each can alone, at lengths that differ.
    """

    request_id: RequestId
    step: int
    prompt_tokens: int
    hit_tokens: int
    seen_tokens: int
    steps_ago: int
    reason: MissReason
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pages:
    """A row for every large page, in columns of little-endian integers, and the latest misses.

    :param group: int16, index into ``groups``; -1 where the large page is empty, -2 where its
        memory is withheld for activations.
    :param used: uint32, small pages that running requests or leases use.
    :param cached: uint32, small pages that are kept for later prompts.
    :param age: uint32, steps since the page that goes last was accessed; 0 where any is used.
    :param misses: the oldest first.
    """

    incarnation: int
    step: int
    groups: tuple[PageGroup, ...] = ()
    group: bytes = b""
    used: bytes = b""
    cached: bytes = b""
    age: bytes = b""
    misses: tuple[Miss, ...] = ()


@dataclass(frozen=True)
class PageOwner:
    """A running request with ``pages`` in a large page, which hold some of its tokens.

    In a group of states, a page holds what the request's tokens before ``end_token`` come to.
    """

    request_id: RequestId
    pages: int
    first_token: int
    end_token: int


@dataclass(frozen=True)
class LargePage:
    """One large page now.

    :param group: as in :class:`Pages`.
    :param owners: at most ``MOST_OWNERS``, those with most pages first.
    :param more_owners: further running requests with pages in it.
    :param other_used: pages used by none of them: held for prefixes that are protected, copied
        from, or written to for later.
    :param cached_ends: lengths of the prefixes that its cached pages end, in tokens; each once, the
        shortest first, and at most ``MOST_OWNERS``.
    """

    large_page: int
    step: int
    group: int = -1
    used: int = 0
    cached: int = 0
    free: int = 0
    age: int = 0
    owners: tuple[PageOwner, ...] = ()
    more_owners: int = 0
    other_used: int = 0
    cached_ends: tuple[int, ...] = ()
