"""Turns what a memory core's index names and drops into notices about blocks of tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvell.engine.core.block_changes import Block, BlockChanges
from kvell.engine.protocol.notices import BlocksHeld, IndexedGroup, IndexNotice
from kvell.engine.requests.block_hashes import BlockHashes, root_digest
from kvell.engine.requests.model_rules import ModelRules
from kvell.memory import DROPPED, NAMED, GroupKind, GroupSpec, HoldingCore, Tokens

STATE_BLOCK_TOKENS = 16
"""Tokens of a block of a model that has states alone."""
KINDS = (
    GroupKind.FULL,
    GroupKind.SLIDING,
    GroupKind.CHUNKED,
    GroupKind.STATE,
    GroupKind.DROPPING,
)
"""Groups whose blocks are told: pages of images are found by content, not by a prefix."""


class Text(Protocol):
    """Tokens that a handle computes or holds: a request, or what came from another instance."""

    @property
    def model(self) -> str:
        """Which of several."""
        ...

    @property
    def cache_root(self) -> str:
        """Of its prefix."""
        ...

    def tokens(self, start: int, end: int) -> Tokens:
        """Some of them, int32."""
        ...


@dataclass
class _Holder:
    text: Text
    chains: dict[int, BlockHashes] = field(default_factory=dict)

    def hash_at(self, end: int, block_tokens: int) -> int:
        """The hash of the block that ends there."""
        text = self.text
        chain = self.chains.get(block_tokens)
        if chain is None:
            chain = BlockHashes(block_tokens, text.model, text.cache_root)
            self.chains[block_tokens] = chain
        return chain.up_to(text.tokens(0, end))


class IndexWatch:
    """Watches one memory core.

    :param with_tokens: whether blocks are told with their tokens.

    States that end inside a block, and pages that are not full, have no block: nothing tells of
    them.  A state counts as stored when all of its pages are.
    """

    def __init__(self, core: HoldingCore, *, with_tokens: bool = True) -> None:
        core.watch_index()
        self._core, self._with_tokens = core, with_tokens
        self._sequence = 0
        self._holders: dict[int, _Holder] = {}
        self._most_holders = 64
        self._block_at: dict[tuple[int, int], int] = {}
        self._pages_of: dict[tuple[int, int], int] = {}
        """(group, hash) → how many pages of the block are cached."""

    def computes(self, handle: int, text: Text) -> None:
        """Note whose handle it is, before a step computes it or what came is cached."""
        if handle not in self._holders:
            self._holders[handle] = _Holder(text)

    def notice(self, computing: Iterable[int]) -> IndexNotice | None:
        """What changed since the last call; None if nothing that is told did.

        :param computing: handles that go on.
        """
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
        self._forget(computing)
        told = changes.told()
        if not told:
            return None
        self._sequence += 1
        return IndexNotice(self._sequence - 1, told)

    def whole(self) -> IndexNotice:
        """All that has been told and is cached still, in place of what was told before."""
        groups = self._core.layout.groups
        held: dict[int, list[int]] = {}
        for (group, block), count in self._pages_of.items():
            if count == _pages(groups[group]):
                held.setdefault(group, []).append(block)
        told = tuple(BlocksHeld(group, tuple(blocks)) for group, blocks in sorted(held.items()))
        self._sequence += 1
        return IndexNotice(self._sequence - 1, told, is_whole=True)

    def _named(self, changes: BlockChanges, group: int, page: int, end: int, handle: int) -> None:
        spec, holder = self._core.layout.groups[group], self._holders.get(handle)
        size = _block_tokens(self._core.layout.groups, spec)
        if holder is None or end % size:
            return
        block = holder.hash_at(end, size)
        self._block_at[group, page] = block
        count = self._pages_of.get((group, block), 0) + 1
        self._pages_of[group, block] = count
        if count == _pages(spec):
            text, tokens = holder.text, b""
            parent = holder.hash_at(end - size, size)
            if self._with_tokens:
                tokens = text.tokens(end - size, end).astype("<i4").tobytes()
            root = root_digest(text.cache_root)
            changes.stored(Block(group, block, parent, tokens, root, size))

    def _dropped(self, changes: BlockChanges, group: int, page: int) -> None:
        block = self._block_at.pop((group, page), None)
        if block is None:
            return
        spec, count = self._core.layout.groups[group], self._pages_of[group, block]
        if count == _pages(spec):
            changes.removed(group, block)
        if count > 1:
            self._pages_of[group, block] = count - 1
        else:
            del self._pages_of[group, block]

    def _forget(self, computing: Iterable[int]) -> None:
        """Forget handles that are closed, now and then."""
        if len(self._holders) > self._most_holders:
            kept = set(computing)
            self._holders = {h: one for h, one in self._holders.items() if h in kept}
            self._most_holders = 64 + 2 * len(self._holders)


def indexed_groups(
    groups: Sequence[GroupSpec], rules: Callable[[str], ModelRules] | None = None
) -> tuple[IndexedGroup, ...]:
    """What notices tell of each group of a layout.

    :param rules: of a model; by default none has two rotation tables.
    """
    return tuple(
        IndexedGroup(
            spec.kind.value,
            _block_tokens(groups, spec) if _is_told(spec) else 0,
            spec.window_tokens,
            spec.model,
            rules(spec.model).limits.short_rope_tokens if rules else 0,
        )
        for spec in groups
    )


def _is_told(spec: GroupSpec) -> bool:
    return spec.kind in KINDS and spec.required_for_hit


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
    """Pages of a block."""
    return spec.slices if spec.kind is GroupKind.STATE else 1
