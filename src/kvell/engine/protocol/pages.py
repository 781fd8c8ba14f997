"""Reports of single pages and of prefix misses, for people who watch an instance's pool."""

from dataclasses import dataclass
from typing import Literal

from kvell.vocabulary import RequestId

MissReason = Literal["never_seen", "other_salt", "being_computed", "evicted", "not_resumable"]
"""The reason for a prefix miss.  ``never_seen``: no remembered request had more of the prompt.
``other_salt``: only requests with another salt had.  ``being_computed``: another request was still
computing it.  ``evicted``: no group has it any more.  ``not_resumable``: some groups have it, but
not all of them can resume there."""

MOST_OWNERS = 4
"""The most requests in ``LargePage.owners``."""


@dataclass(frozen=True)
class AskPages:
    """The command to send :class:`Pages` once; its time grows with the number of large pages."""


@dataclass(frozen=True)
class AskLargePage:
    """The command to send :class:`LargePage` once."""

    large_page: int


@dataclass(frozen=True)
class PageGroup:
    """A layer group of the pool; ``kind`` is the kind of its layers."""

    name: str
    kind: str
    layers: int
    page_tokens: int
    page_bytes: int
    pages_per_large: int


@dataclass(frozen=True)
class Miss:
    """A request whose prompt was not cached whole at its first admission.

    :param hit_tokens: prompt tokens that were cached.
    :param seen_tokens: prompt tokens that a remembered request had, under any salt if the reason is
        ``other_salt``; prefixes are remembered at certain lengths only.
    :param steps_ago: steps since these tokens were last seen; 0 if they never were.
    :param groups: names of groups that cannot resume there, if the reason is ``not_resumable``.
        Empty if each group can resume, but at different lengths.
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

    :param group: int16, index into ``groups``; -1 if the large page is empty, -2 if its memory is
        withheld for activations.
    :param used: uint32, small pages that running requests or leases use.
    :param cached: uint32, small pages that are cached for later prompts.
    :param age: uint32, steps since the last access to any small page of it; 0 if one is used.
    :param lent: uint32, used small pages that are lent to other instances; empty if none is.
    :param misses: the latest misses, oldest first.
    """

    incarnation: int
    step: int
    groups: tuple[PageGroup, ...] = ()
    group: bytes = b""
    used: bytes = b""
    cached: bytes = b""
    age: bytes = b""
    misses: tuple[Miss, ...] = ()
    lent: bytes = b""


@dataclass(frozen=True)
class PageOwner:
    """A running request with ``pages`` in a large page, which hold some of its tokens.

    In a group of states, a page holds the state after the tokens before ``end_token``.
    """

    request_id: RequestId
    pages: int
    first_token: int
    end_token: int


@dataclass(frozen=True)
class LargePage:
    """The state of one large page.

    :param group: as in :class:`Pages`.
    :param owners: running requests with most pages in it, at most ``MOST_OWNERS``, most first.
    :param more_owners: number of further running requests with pages in it.
    :param other_used: used pages of no running request: of protected prefixes, sources of copies,
        or pages that are written for later prompts.
    :param cached_ends: lengths in tokens of the prefixes that end in its cached pages, without
        duplicates, shortest first, at most ``MOST_OWNERS``.
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
