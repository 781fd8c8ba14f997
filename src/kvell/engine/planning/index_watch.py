"""Turns what a memory core's index names and drops into notices about blocks of tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvell.engine.planning.block_changes import Block, BlockChanges
from kvell.engine.protocol.notices import IndexNotice
from kvell.engine.requests.block_hashes import BlockHashes, root_digest
from kvell.engine.requests.request import Request
from kvell.memory import DROPPED, NAMED, GroupKind, GroupSpec, HoldingCore

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


@dataclass
class _Holder:
    request: Request
    chains: dict[int, BlockHashes] = field(default_factory=dict)

    def hash_at(self, end: int, block_tokens: int) -> int:
        """The hash of the block that ends there."""
        request = self.request
        chain = self.chains.get(block_tokens)
        if chain is None:
            chain = BlockHashes(block_tokens, request.model, request.cache_root)
            self.chains[block_tokens] = chain
        return chain.up_to(request.tokens(0, end))


class IndexWatch:
    """Watches one memory core.

    States that end inside a block, and pages that are not full, have no block: nothing tells of
    them.  A state counts as stored when all of its pages are.
    """

    def __init__(self, core: HoldingCore) -> None:
        core.watch_index()
        self._core = core
        self._sequence = 0
        self._holders: dict[int, _Holder] = {}
        self._most_holders = 64
        self._block_at: dict[tuple[int, int], int] = {}
        self._pages_of: dict[tuple[int, int], int] = {}
        """(group, hash) → how many pages of the block are cached."""

    def computes(self, handle: int, request: Request) -> None:
        """Note whose handle it is, before a step computes it."""
        if handle not in self._holders:
            self._holders[handle] = _Holder(request)

    def notice(self, computing: Iterable[int]) -> IndexNotice | None:
        """What changed since the last call; None if nothing that is told did.

        :param computing: handles that go on.
        """
        changes = BlockChanges(self._core.layout.groups)
        for change, group, page, end, other in self._core.index_changes().tolist():
            spec = self._core.layout.groups[group]
            if spec.kind not in KINDS or not spec.required_for_hit:
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

    def _named(self, changes: BlockChanges, group: int, page: int, end: int, handle: int) -> None:
        spec, holder = self._core.layout.groups[group], self._holders.get(handle)
        size = self._block_tokens(spec)
        if holder is None or end % size:
            return
        block = holder.hash_at(end, size)
        self._block_at[group, page] = block
        count = self._pages_of.get((group, block), 0) + 1
        self._pages_of[group, block] = count
        if count == _pages(spec):
            request = holder.request
            parent = holder.hash_at(end - size, size)
            tokens = request.tokens(end - size, end).astype("<i4").tobytes()
            root = root_digest(request.cache_root)
            changes.stored(Block(group, block, parent, tokens, root))

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

    def _block_tokens(self, spec: GroupSpec) -> int:
        if spec.kind is not GroupKind.STATE:
            return spec.page_tokens
        sizes = [
            group.page_tokens
            for group in self._core.layout.groups
            if group.model == spec.model and group.kind.counts_tokens and group.required_for_hit
        ]
        return min(sizes, default=STATE_BLOCK_TOKENS)

    def _forget(self, computing: Iterable[int]) -> None:
        """Forget handles that are closed, now and then."""
        if len(self._holders) > self._most_holders:
            kept = set(computing)
            self._holders = {h: one for h, one in self._holders.items() if h in kept}
            self._most_holders = 64 + 2 * len(self._holders)


def _pages(spec: GroupSpec) -> int:
    """Pages of a block."""
    return spec.slices if spec.kind is GroupKind.STATE else 1
