"""The state of a memory core as plain data: what the audit reads and tests compare."""

from dataclasses import dataclass, field

from kvell.pages.pool import Key


@dataclass(frozen=True)
class HolderSnapshot:
    """One holder: per group, the first page position and the pages from there.

    ``others`` are (group, page) that it uses beside them: to copy from, to write states to.
    While it ``is_receiving``, what is computed may have no pages yet.
    """

    handle: int
    computed: int
    published: int
    is_lease: bool
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    others: tuple[tuple[int, int], ...] = ()
    is_receiving: bool = False


@dataclass(frozen=True)
class IndexEntry:
    """The index names ``page`` of ``group`` at a place, in a node of these tokens.

    The page is of the prefix of ``end`` tokens; ``part`` tells pages of one end apart.
    """

    group: int
    page: int
    end: int
    part: int
    node_start: int
    node_end: int


@dataclass(frozen=True)
class PoolTotals:
    """How a pool is divided: large pages of no group, and small pages per group.

    In large pages with a used page, ``unwritten_pages`` were never used since the
    large page joined its group; ``stranded_pages`` are cached or empty again, and no
    other group can get them.  Counters since the start: ``hit_tokens`` of claimed
    requests' prefixes; ``group_hit_tokens`` of the cached pages that these took in each
    group (a window takes its own only); ``checkpoint_pages`` written for states on the way.
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
    """Everything, by large page and by small page.

    ``refs`` and ``keys`` are per group: page → users, and page → place in the
    eviction order for pages that the index names.  ``withheld`` large pages, by id, are
    somebody else's memory now.
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

    @property
    def num_empty_large(self) -> int:
        """Large pages that belong to no group and are to be had."""
        return sum(1 for group in self.group if group < 0) - len(self.withheld)
