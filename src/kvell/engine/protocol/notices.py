"""What an instance's prefix index has come to name, and names no longer, for who routes by it.

A *block* is a whole page of tokens, known by a hash of all tokens up to its end, of the model and
of the cache's root.  Every layer group tells of its own blocks: a prefix can be resumed only where
every group has what it needs.
"""

from dataclasses import dataclass

from msgspec import Struct

NO_BLOCK = 0
"""The hash of no block: the parent of the first."""


class IndexedGroup(Struct, frozen=True):
    """What the blocks of a layer group are, at the group's place in a layout.

    :param kind: its :class:`~kvell.memory.GroupKind`.
    :param block_tokens: of a block; 0 if notices do not tell of the group.
    :param window_tokens: tokens of the window, or of the chunk; 0 without.
    :param model: which of several the group belongs to.
    :param short_rope_tokens: longer texts of the model have keys of another table, so blocks of
        their own; 0: it has one table.
    """

    kind: str
    block_tokens: int
    window_tokens: int = 0
    model: str = ""
    short_rope_tokens: int = 0


@dataclass(frozen=True)
class WatchIndex:
    """Send :class:`IndexNotice` from now on; if that is done already, tell of all that is cached.

    What was cached before the first time is not told.

    :param with_tokens: whether blocks are told with their tokens, from the first time on.
    """

    with_tokens: bool = True


class BlocksStored(Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks that follow one another are cached now.

    :param group: index of the layer group.
    :param kind: its :class:`~kvell.memory.GroupKind`.
    :param parent: hash of the block before the first; ``NO_BLOCK`` if there is none.
    :param hashes: 64 bits each.
    :param tokens: of these blocks, little-endian int32; images' tokens have negative ids.
    :param block_tokens: of a block.
    :param window_tokens: tokens of the window, or of the chunk; 0 without.
    :param root: digest of the cache root; "" where there is no salt.
    """

    group: int
    kind: str
    parent: int
    hashes: tuple[int, ...]
    tokens: bytes
    block_tokens: int
    window_tokens: int = 0
    root: str = ""


class BlocksRemoved(Struct, frozen=True, tag=True):
    """Blocks are cached in a group no longer.

    :param group: index of the layer group.
    :param hashes: 64 bits each.
    """

    group: int
    hashes: tuple[int, ...]


class BlocksHeld(Struct, frozen=True, tag=True):
    """All of a group's blocks that are cached.

    :param group: index of the layer group.
    :param hashes: 64 bits each.
    """

    group: int
    hashes: tuple[int, ...]


@dataclass(frozen=True)
class IndexNotice:
    """What is cached or is not any more.

    :param sequence: counts the notices of an incarnation from 0.
    :param changes: in order.
    :param is_whole: the changes are all that is cached: they replace what was told before.
    """

    sequence: int
    changes: tuple[BlocksStored | BlocksRemoved | BlocksHeld, ...]
    is_whole: bool = False
