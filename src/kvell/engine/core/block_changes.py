"""Changes of an index's blocks; consecutive blocks are merged."""

from dataclasses import dataclass, field

from kvell.engine.protocol.notices import BlocksRemoved, BlocksStored
from kvell.memory import GroupSpec


@dataclass(frozen=True)
class Block:
    """A block that is stored.

    :param tokens: little-endian int32; empty if notices contain no tokens.
    :param root: digest of its cache root.
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
        """Append a block if it follows the others; return whether it does."""
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
        """Add a block that is cached now."""
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
        """Return all changes as records of the instance protocol."""
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
