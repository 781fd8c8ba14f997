"""The compiled memory core.

``CompiledCore`` inherits its methods from the extension, so most calls run no Python code.  This
module adds only the layout and the conversion of results.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.pages.snapshot import HolderSnapshot, IndexEntry, PoolSnapshot, PoolTotals
from kvell.prefix.eviction.checkpoints import WORTH_TOKENS, is_worth_displacing
from kvell.prefix.eviction.hazard import HazardRule
from kvell.prefix.extension import _core
from kvell.prefix.groups.policies import policy_of
from kvell.prefix.interface import LongInts

RUNGS = (
    "own_page",
    "own_large_page",
    "shared_page",
    "others_page",
    "evict_large",
    "evict_page",
    "checkpoint",
    "skip_checkpoint",
)
"""The sources of pages, in the order of trial, then checkpoints kept and not kept."""


class CompiledCore(_core.CompiledCore):
    """:class:`kvell.prefix.interface.MemoryCore` over flat arrays.

    Misuse raises before anything has changed: ``KeyError`` for a handle that is not open,
    ``ValueError`` for decreasing steps, arrays of different lengths, and tokens computed beyond a
    holder's pages or tokens.
    """

    def __init__(self, layout: Layout, rule: HazardRule | None = None) -> None:
        """:param rule: the settings of the learned rule. None: least recently used."""
        super().__init__(
            _all_rules(layout.groups),
            layout.num_large_pages,
            layout.large_page_bytes,
            layout.association == "literal",
            layout.quota_large_pages or (),
            rule.settings if rule else (),
            rule.refit if rule else None,
        )
        self.layout = layout

    def register(self, groups: Sequence[GroupSpec]) -> None:
        check_new_groups(self.layout, groups)
        self.add_groups(_all_rules(groups))
        self.layout = replace(self.layout, groups=(*self.layout.groups, *groups))

    def totals(self) -> PoolTotals:
        """Implement :meth:`MemoryCore.totals`."""
        empty, used, cached, evicted, hit_tokens, rungs, *by_group = self.division()
        unwritten, stranded, group_hit_tokens, checkpoint_pages = by_group
        return PoolTotals(
            empty,
            used,
            cached,
            evicted,
            hit_tokens,
            dict(zip(RUNGS, rungs, strict=True)),
            unwritten,
            stranded,
            group_hit_tokens,
            checkpoint_pages,
        )

    def large_pages(self) -> LongInts:
        return self.large_rows().reshape(-1, 4)

    def small_pages(self, large: int) -> LongInts:
        return self.small_rows(large).reshape(-1, 4)

    def snapshot(self) -> PoolSnapshot:
        """Implement :meth:`MemoryCore.snapshot`."""
        larges, pages, whole, partial, holders, nodes, evicted, hit_tokens, rungs, withheld = (
            self.state()
        )
        group, owner, used, cached, empty_masks = larges
        refs, keys, index = pages
        return PoolSnapshot(
            group=group,
            owner=owner,
            used=used,
            cached=cached,
            empty_masks=empty_masks,
            refs=refs,
            keys=keys,
            whole=whole,
            partial=partial,
            holders=tuple(HolderSnapshot(*holder) for holder in holders),
            index=tuple(IndexEntry(*entry) for entry in index),
            num_nodes=nodes,
            evicted_pages=evicted,
            hit_tokens=hit_tokens,
            rungs=dict(zip(RUNGS, rungs, strict=True)),
            withheld=withheld,
        )


KINDS = tuple(GroupKind)
"""The kinds by their number in the extension (``Kind`` in rules.h)."""


Rules = tuple[int, int, int, int, int, bool, bool, bool, int, int, str]


def _all_rules(groups: Sequence[GroupSpec]) -> list[Rules]:
    return [_rules(group, [g for g in groups if g.model == group.model]) for group in groups]


def _rules(group: GroupSpec, own: Sequence[GroupSpec]) -> Rules:
    return (
        group.page_tokens,
        group.pages_per_large,
        KINDS.index(group.kind),
        group.window_tokens,
        group.slices,
        policy_of(group).required_for_hit,
        group.counts_images,
        group.holds_embeddings,
        group.page_stride_bytes,
        _worth_tokens(group, own),
        group.model,
    )


def _worth_tokens(group: GroupSpec, own: Sequence[GroupSpec]) -> int:
    """Return the fewest tokens that a state of the group must save to displace cached pages."""
    saved = range(WORTH_TOKENS)
    return next((n for n in saved if is_worth_displacing(group, own, n)), WORTH_TOKENS)


def check_new_groups(layout: Layout, groups: Sequence[GroupSpec]) -> None:
    """Raise ValueError if a pool of this layout cannot also serve these groups."""
    models = {group.model for group in layout.groups}
    if layout.quota_large_pages is not None:
        raise ValueError("the pool was cut into shares at start: there is none to give")
    for group in groups:
        if group.model in models:
            raise ValueError(f"model {group.model!r} is in the pool already")
        if group.page_stride_bytes * group.pages_per_large != layout.large_page_bytes:
            raise ValueError(f"pages of group {group.name!r} do not divide the large page")
