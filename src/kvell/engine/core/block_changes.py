"""Changes of an index's blocks, those that follow one another as one."""

from dataclasses import dataclass, field

from kvell.engine.protocol.notices import BlocksRemoved, BlocksStored
from kvell.memory import GroupSpec


@dataclass(frozen=True)
class Block:
    """A block that is stored.

    :param tokens: of this block, little-endian int32; empty if nobody wants them.
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
        """Whether the block follows the others, and is taken."""
        follows = block.parent == self.hashes[-1] if self.hashes else block is self.first
        if block.group != self.first.group or not follows:
            return False
        self.hashes.append(block.block_hash)
        self.tokens += block.tokens
        return True


class BlockChanges:
    """Gathers changes in order."""

    def __init__(self, groups: tuple[GroupSpec, ...]) -> None:
        self._groups = groups
        self._changes: list[_Stored | tuple[int, list[int]]] = []

    def stored(self, block: Block) -> None:
        """A block is cached now."""
        last = self._changes[-1] if self._changes else None
        if isinstance(last, _Stored) and last.take(block):
            return
        new = _Stored(block)
        new.take(block)
        self._changes.append(new)

    def removed(self, group: int, block_hash: int) -> None:
        """A block is cached no longer."""
        last = self._changes[-1] if self._changes else None
        if isinstance(last, tuple) and last[0] == group:
            last[1].append(block_hash)
        else:
            self._changes.append((group, [block_hash]))

    def told(self) -> tuple[BlocksStored | BlocksRemoved, ...]:
        """All changes, as the instance protocol says them."""
        return tuple(
            self._of_stored(one)
            if isinstance(one, _Stored)
            else BlocksRemoved(one[0], tuple(one[1]))
            for one in self._changes
        )

    def _of_stored(self, one: _Stored) -> BlocksStored:
        group = self._groups[one.first.group]
        return BlocksStored(
            one.first.group,
            group.kind.value,
            one.first.parent,
            tuple(one.hashes),
            bytes(one.tokens),
            one.first.size_tokens,
            group.window_tokens,
            one.first.root,
        )
