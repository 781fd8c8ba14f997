"""The compiled memory core: the decisions of ``ReferenceCore``, at the speed of C++.

The class of the extension does all the work and is inherited from, so that a call
costs no Python at all; here are only the layout it was made for and its snapshot.
"""

from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.pages.snapshot import HolderSnapshot, IndexEntry, PoolSnapshot, PoolTotals
from kvell.prefix import _core
from kvell.prefix.placement import RUNGS


class CompiledCore(_core.CompiledCore):
    """:class:`kvell.prefix.interface.MemoryCore` over flat arrays.

    Misuse raises before anything has changed: ``KeyError`` for a handle that is
    not open, ``ValueError`` for steps that go back, arrays of different lengths, and
    tokens computed beyond a holder's pages or known tokens.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(
            [_rules(group) for group in layout.groups],
            layout.num_large_pages,
            layout.association == "literal",
            layout.quota_large_pages or (),
        )
        self.layout = layout

    def totals(self) -> PoolTotals:
        """How the pool is divided now, and counters so far."""
        empty, used, cached, evicted, hit_tokens, rungs, *by_group = self.division()
        unwritten, stranded, group_hit_tokens = by_group
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
        )

    def snapshot(self) -> PoolSnapshot:
        """The whole state as plain data, for the audit and for comparison."""
        larges, pages, whole, partial, holders, nodes, evicted, hit_tokens, rungs = self.state()
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
        )


KINDS = (GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED)
"""Kinds by their number in the extension (``Kind`` in rules.h)."""


def _rules(group: GroupSpec) -> tuple[int, int, int, int]:
    """What the extension knows of a group: page tokens, pages per large page, kind, window."""
    return (
        group.page_tokens,
        group.pages_per_large,
        KINDS.index(group.kind),
        group.window_tokens,
    )
