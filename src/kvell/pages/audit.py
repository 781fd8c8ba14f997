"""The audit: every invariant of the pool, written once.

It reads a snapshot, counts everything again from the holders' tables and the
index, and reports each difference in a sentence.
"""

from collections import Counter
from collections.abc import Iterator

from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.pages.snapshot import KEEPERS, NO_GROUP, SHARED, HolderSnapshot, PoolSnapshot


def audit(layout: Layout, state: PoolSnapshot) -> list[str]:
    """Return every contradiction in the state, a sentence for each; empty if there is none."""
    return [
        *_references(state),
        *_large_pages(layout, state),
        *_supply(layout, state),
        *_shares(layout, state),
        *_index(layout, state),
        *_tables(layout, state),
    ]


def _references(state: PoolSnapshot) -> Iterator[str]:
    for group, refs in enumerate(state.refs):
        held = Counter(page for h in state.holders for page in h.groups[group][1])
        held.update(page for h in state.holders for g, page in h.others if g == group)
        for page in held.keys() | refs.keys():
            if held[page] != refs.get(page, 0):
                yield (
                    f"group {group} page {page}: {held[page]} holders, "
                    f"{refs.get(page, 0)} references"
                )


def _large_pages(layout: Layout, state: PoolSnapshot) -> Iterator[str]:
    live = {h.handle for h in state.holders}
    for large in state.withheld:
        if state.group[large] != NO_GROUP:
            yield f"large page {large}: withheld, yet in group {state.group[large]}"
    for large, group in enumerate(state.group):
        if group == NO_GROUP:
            if state.used[large] or state.cached[large] or state.empty_masks[large]:
                yield f"large page {large}: in no group, but not empty"
            continue
        count = layout.groups[group].pages_per_large
        pages = range(large * count, (large + 1) * count)
        used = {p for p in pages if p in state.refs[group]}
        cached = {p for p in pages if p in state.keys[group]} - used
        empty = {p for p in pages if state.empty_masks[large] >> (p - pages.start) & 1}
        if (len(used), len(cached)) != (state.used[large], state.cached[large]):
            yield (
                f"large page {large}: counts {state.used[large]} used, {state.cached[large]} "
                f"cached; it has {len(used)} and {len(cached)}"
            )
        if empty & (used | cached) or len(empty | used | cached) != count:
            yield f"large page {large}: a page has two states or none"
        if not used and not cached:
            yield f"large page {large}: all empty, yet in group {group}"
        if empty and state.owner[large] not in live | {SHARED, *KEEPERS}:
            yield f"large page {large}: of holder {state.owner[large]}, which has ended"


def _supply(layout: Layout, state: PoolSnapshot) -> Iterator[str]:
    whole = sum(1 for used in state.used if not used) - len(state.withheld)
    if whole != state.whole:
        yield f"{whole} large pages have no used page; the supply says {state.whole}"
    for index, group in enumerate(layout.groups):
        partial = sum(
            group.pages_per_large - used
            for g, used in zip(state.group, state.used, strict=True)
            if g == index and used
        )
        if partial != state.partial[index]:
            yield (
                f"group {index}: {partial} pages available in used large pages, "
                f"not {state.partial[index]}"
            )


def _shares(layout: Layout, state: PoolSnapshot) -> Iterator[str]:
    """Check that no group has more large pages than its share of a pool cut at start."""
    for group, share in enumerate(layout.quota_large_pages or ()):
        held = state.group.count(group)
        if held > share:
            yield f"group {group}: holds {held} large pages, its share is {share}"


def _index(layout: Layout, state: PoolSnapshot) -> Iterator[str]:
    """Check that the index names only used and cached pages, each once, at its last token."""
    named = [Counter(e.page for e in state.index if e.group == g) for g in range(len(state.keys))]
    for group, keys in enumerate(state.keys):
        if named[group].keys() != keys.keys() or any(n > 1 for n in named[group].values()):
            yield f"group {group}: the index and the pool disagree on which pages are named"
        count = layout.groups[group].pages_per_large
        for page in keys:
            if state.group[page // count] != group:
                yield f"group {group} page {page}: named, but its large page is not of the group"
    for entry in state.index:
        if not entry.node_start < entry.end <= entry.node_end:
            yield f"group {entry.group} page {entry.page}: filed in the wrong node"


def _tables(layout: Layout, state: PoolSnapshot) -> Iterator[str]:
    for holder in state.holders:
        for index, (first, pages) in enumerate(holder.groups):
            group = layout.groups[index]
            size = group.page_tokens
            if holder.is_reservation:
                if any(page in state.keys[index] for page in pages):
                    yield f"holder {holder.handle}: a reserved page of group {index} is named"
                continue
            if group.kind is GroupKind.STATE and len(pages) not in (0, group.slices):
                yield f"holder {holder.handle}: part of a state in group {index}"
            if not _is_plain(group) or not pages:
                continue
            if group.kind is GroupKind.FULL and first * size < holder.away_tokens:
                yield f"holder {holder.handle}: has pages of group {index} that are remote"
            if holder.is_receiving:
                continue
            if group.required_for_hit and (first + len(pages)) * size < _must_hold(
                holder, index, size
            ):
                yield f"holder {holder.handle}: tokens computed beyond its pages in group {index}"
            for position, page in enumerate(pages, start=first):
                reserved = position * size >= holder.computed
                if reserved and page in state.keys[index]:
                    yield f"holder {holder.handle}: a reserved page of group {index} is named"


def _must_hold(holder: HolderSnapshot, group: int, page_tokens: int) -> int:
    """Return the tokens that must be on own pages; part of the last page may await a copy."""
    copies = any(other == group for other, _ in holder.others)
    return holder.computed // page_tokens * page_tokens if copies else holder.computed


def _is_plain(group: GroupSpec) -> bool:
    """Return whether position ``i`` is always the page of tokens ``i × page_tokens`` and on."""
    moves = group.kind is GroupKind.DROPPING or group.counts_images
    return group.kind.counts_tokens and not moves
