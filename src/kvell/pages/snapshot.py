"""The state of a memory core as plain data, for the audit and tests."""

from dataclasses import dataclass, field

from kvell.vocabulary import PageId

NO_GROUP = -1
"""The group of an empty large page."""
SHARED = -1
"""The owner of a large page that is associated with no holder."""
KEEPERS = (-2, -3, -4)
"""Owners of large pages for cached pages only, by their eviction rank: pages that are kept for
later are thus separate from pages in use, and are evicted as a whole."""

Key = tuple[int, int, int]
"""Eviction order of a cached page, smallest first: (rank, time, -prefix length)."""


@dataclass(frozen=True)
class HolderSnapshot:
    """One holder: per group, the first page position and the pages from there.

    :param handle: its name.
    :param computed: tokens that are computed.
    :param published: tokens up to which its pages were offered to the index.
    :param is_lease: whether it is a lease on a prefix rather than a request.
    :param groups: for each group, the first position with a page, and the pages from there.
    :param others: further (group, page) that it uses: to copy from, to write states to.
    :param is_receiving: whether computed tokens may have no pages yet.
    :param is_reservation: whether its pages belong to no text yet.
    :param away_tokens: its first tokens, whose pages in full attention groups are remote.
    """

    handle: int
    computed: int
    published: int
    is_lease: bool
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    others: tuple[tuple[int, int], ...] = ()
    is_receiving: bool = False
    is_reservation: bool = False
    away_tokens: int = 0


@dataclass(frozen=True)
class IndexEntry:
    """A page that the index names, at its place in the tree.

    :param group: of the page.
    :param page: its number.
    :param end: tokens of the prefix that the page ends.
    :param part: distinguishes pages of one end: slices of a state, pages of an image; else 0.
    :param node_start: first token of the tree's node that holds the page.
    :param node_end: the token after that node's last one.
    """

    group: int
    page: PageId
    end: int
    part: int
    node_start: int
    node_end: int


@dataclass(frozen=True)
class PoolTotals:
    """The division of a pool now, and counters since its start; tuples have an item per group.

    :param empty_large: large pages of no group.
    :param used_pages: small pages with a user.
    :param cached_pages: small pages kept for hits.
    :param evicted_pages: small pages evicted so far.
    :param hit_tokens: cached tokens of the prefixes of claimed requests so far.
    :param rungs: number of pages obtained, by the rung of the ladder that had one.
    :param unwritten_pages: pages never used since their large page, which has a used page, joined
        the group.
    :param stranded_pages: pages in such large pages that are cached or empty again; no other group
        can get them.
    :param group_hit_tokens: tokens of the cached pages that claimed requests took in each group; a
        window takes its own only.
    :param checkpoint_pages: pages written so far for states on the way of a prompt.
    """

    empty_large: int
    used_pages: tuple[int, ...]
    cached_pages: tuple[int, ...]
    evicted_pages: tuple[int, ...]
    hit_tokens: int
    rungs: dict[str, int]
    unwritten_pages: tuple[int, ...]
    stranded_pages: tuple[int, ...]
    group_hit_tokens: tuple[int, ...]
    checkpoint_pages: tuple[int, ...]


@dataclass(frozen=True)
class PoolSnapshot:
    """The whole state of a core; the first five have an item per large page.

    :param group: index of its group; negative for none.
    :param owner: the holder that it is associated with; negative for none.
    :param used: its small pages with a user.
    :param cached: its small pages that are kept for hits.
    :param empty_masks: a bit for each empty small page of it, the first page's lowest.
    :param refs: for each group, the number of users by page.
    :param keys: for each group, the place in the eviction order by page, for pages that the index
        names.
    :param whole: large pages without a used page.
    :param partial: for each group, unused pages in large pages that have a used one.
    :param holders: requests and leases.
    :param index: all pages that the index names.
    :param num_nodes: nodes of the index.
    :param evicted_pages: for each group, pages evicted so far.
    :param hit_tokens: cached tokens of the prefixes of claimed requests so far.
    :param rungs: number of pages obtained, by the rung of the ladder that had one.
    :param withheld: numbers of the large pages whose memory has another owner now.
    """

    group: tuple[int, ...]
    owner: tuple[int, ...]
    used: tuple[int, ...]
    cached: tuple[int, ...]
    empty_masks: tuple[int, ...]
    refs: tuple[dict[int, int], ...]
    keys: tuple[dict[int, Key], ...]
    whole: int
    partial: tuple[int, ...]
    holders: tuple[HolderSnapshot, ...]
    index: tuple[IndexEntry, ...]
    num_nodes: int
    evicted_pages: tuple[int, ...]
    hit_tokens: int
    rungs: dict[str, int] = field(default_factory=dict)
    withheld: tuple[int, ...] = ()
