"""Notices about the blocks of tokens that a memory core's prefix index inserts and drops."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvell.engine.protocol.notices import (
    BlocksHeld,
    BlocksRemoved,
    BlocksStored,
    IndexedGroup,
    IndexNotice,
)
from kvell.engine.requests.block_hashes import BlockHashes, root_digest
from kvell.engine.requests.limits import ModelRules
from kvell.memory import DROPPED, IMAGE_KINDS, NAMED, GroupKind, GroupSpec, HoldingCore, Tokens
from kvell.vocabulary import PageId


@dataclass(frozen=True)
class Block:
    """A block that is stored.

    :param tokens: little-endian int32; empty if notices contain no tokens.
    """

    group: int
    block_hash: int
    parent: int
    tokens: bytes
    root: str
    size_tokens: int


@dataclass
class _Stored:
    """Blocks of one group, each the parent of the next."""

    first: Block
    hashes: list[int] = field(default_factory=list)
    tokens: bytearray = field(default_factory=bytearray)

    def take(self, block: Block) -> bool:
        follows = block.parent == self.hashes[-1] if self.hashes else block is self.first
        if block.group != self.first.group or not follows:
            return False
        self.hashes.append(block.block_hash)
        self.tokens += block.tokens
        return True


class BlockChanges:
    """Changes of blocks, in order."""

    def __init__(self, groups: tuple[GroupSpec, ...]) -> None:
        self._groups = groups
        self._changes: list[_Stored | tuple[int, list[int]]] = []

    def on_stored(self, block: Block) -> None:
        last = self._changes[-1] if self._changes else None
        if isinstance(last, _Stored) and last.take(block):
            return
        new = _Stored(block)
        new.take(block)
        self._changes.append(new)

    def on_removed(self, group: int, block_hash: int) -> None:
        last = self._changes[-1] if self._changes else None
        if isinstance(last, tuple) and last[0] == group:
            last[1].append(block_hash)
        else:
            self._changes.append((group, [block_hash]))

    def take(self) -> tuple[BlocksStored | BlocksRemoved, ...]:
        return tuple(
            self._of_stored(change)
            if isinstance(change, _Stored)
            else BlocksRemoved(change[0], tuple(change[1]))
            for change in self._changes
        )

    def _of_stored(self, change: _Stored) -> BlocksStored:
        group = self._groups[change.first.group]
        return BlocksStored(
            change.first.group,
            group.kind.value,
            change.first.parent,
            tuple(change.hashes),
            bytes(change.tokens),
            change.first.size_tokens,
            group.window_tokens,
            change.first.root,
        )


STATE_BLOCK_TOKENS = 16
"""Tokens in a block of a model that has only states."""


@dataclass
class _Text:
    """The text of a handle: of a request, or of one that came from another instance."""

    model: str
    cache_root: str
    tokens: Callable[[int, int], Tokens]
    chains: dict[int, BlockHashes] = field(default_factory=dict)

    def hash_at(self, end: int, block_tokens: int) -> int:
        chain = self.chains.get(block_tokens)
        if chain is None:
            chain = BlockHashes(block_tokens, self.model, self.cache_root)
            self.chains[block_tokens] = chain
        return chain.up_to(self.tokens(0, end))


class IndexWatch:
    """A watch of one memory core's prefix index.

    :param with_tokens: whether notices contain the tokens of blocks.

    States that end inside a block, and pages that are not full, have no block and are not
    reported.  A state counts as stored when all of its pages are.
    """

    def __init__(self, core: HoldingCore, *, with_tokens: bool = True) -> None:
        core.watch_index()
        self._core, self._with_tokens = core, with_tokens
        self._sequences = itertools.count()
        self._holders: dict[int, _Text] = {}
        self._most_holders = 64
        self._block_at: dict[tuple[int, int], int] = {}
        self._pages_of: dict[tuple[int, int], int] = {}
        """(group, hash) → number of cached pages of the block."""

    def computes(
        self, handle: int, model: str, cache_root: str, tokens: Callable[[int, int], Tokens]
    ) -> None:
        """Record the text of a handle, before a step computes or an arrival caches its pages.

        :param tokens: returns the tokens from a start to an end, int32.
        """
        if handle not in self._holders:
            self._holders[handle] = _Text(model, cache_root, tokens)

    def notice(self, computing: Iterable[int]) -> IndexNotice | None:
        """Return the reported changes since the last call; None if there are none."""
        changes = BlockChanges(self._core.layout.groups)
        for change, group, page, end, other in self._core.index_changes().tolist():
            spec = self._core.layout.groups[group]
            if not _is_told(spec):
                continue
            if change == NAMED:
                self._named(changes, group, page, end, other)
            elif change == DROPPED:
                self._dropped(changes, group, page)
            elif (block := self._block_at.pop((group, page), None)) is not None:
                self._block_at[group, other] = block
        if len(self._holders) > self._most_holders:
            kept = set(computing)
            self._holders = {h: holder for h, holder in self._holders.items() if h in kept}
            self._most_holders = 64 + 2 * len(self._holders)
        records = changes.take()
        return IndexNotice(next(self._sequences), records) if records else None

    def whole(self) -> IndexNotice:
        """Return a snapshot of all reported blocks still cached; it replaces earlier notices."""
        groups = self._core.layout.groups
        held: dict[int, list[int]] = {}
        for (group, block), count in self._pages_of.items():
            if count == _pages(groups[group]):
                held.setdefault(group, []).append(block)
        records = tuple(BlocksHeld(group, tuple(blocks)) for group, blocks in sorted(held.items()))
        return IndexNotice(next(self._sequences), records, is_whole=True)

    def _named(
        self, changes: BlockChanges, group: int, page: PageId, end: int, handle: int
    ) -> None:
        spec = self._core.layout.groups[group]
        holder = self._holders.get(handle)
        size = _block_tokens(self._core.layout.groups, spec)
        if holder is None or end % size:
            return
        block = holder.hash_at(end, size)
        self._block_at[group, page] = block
        count = self._pages_of.get((group, block), 0) + 1
        self._pages_of[group, block] = count
        if count == _pages(spec):
            tokens = b""
            parent = holder.hash_at(end - size, size)
            if self._with_tokens:
                tokens = holder.tokens(end - size, end).astype("<i4").tobytes()
            root = root_digest(holder.cache_root)
            changes.on_stored(Block(group, block, parent, tokens, root, size))

    def _dropped(self, changes: BlockChanges, group: int, page: PageId) -> None:
        block = self._block_at.pop((group, page), None)
        if block is None:
            return
        spec, count = self._core.layout.groups[group], self._pages_of[group, block]
        if count == _pages(spec):
            changes.on_removed(group, block)
        if count > 1:
            self._pages_of[group, block] = count - 1
        else:
            del self._pages_of[group, block]


def indexed_groups(
    groups: Sequence[GroupSpec],
    rules: Callable[[str], ModelRules] | None = None,
    *,
    is_cached: bool = True,
) -> tuple[IndexedGroup, ...]:
    """Return the properties of each group of a layout that readers of notices need.

    :param is_cached: False if no request shares pages, so no notice covers a group.
    :param rules: returns the rules of a model; None: no model has two rotation tables.
    """
    return tuple(
        IndexedGroup(
            spec.kind.value,
            _block_tokens(groups, spec) if is_cached and _is_told(spec) else 0,
            spec.window_tokens,
            spec.model,
            rules(spec.model).limits.short_rope_tokens if rules else 0,
        )
        for spec in groups
    )


def _is_told(spec: GroupSpec) -> bool:
    """Return whether blocks are reported; pages of images are found by content, not by a prefix."""
    return spec.kind not in IMAGE_KINDS and spec.required_for_hit


def _block_tokens(groups: Sequence[GroupSpec], spec: GroupSpec) -> int:
    if spec.kind is not GroupKind.STATE:
        return spec.page_tokens
    sizes = [
        group.page_tokens
        for group in groups
        if group.model == spec.model and group.kind.counts_tokens and group.required_for_hit
    ]
    return min(sizes, default=STATE_BLOCK_TOKENS)


def _pages(spec: GroupSpec) -> int:
    return spec.slices if spec.kind is GroupKind.STATE else 1
