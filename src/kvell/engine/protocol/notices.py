"""Notices of additions to and removals from an instance's prefix index, for routers.

A *block* is a whole page of tokens, identified by a hash of all tokens up to its end, of the model
and of the cache root.  Each layer group reports separately: a prefix can be resumed only where
every group has the blocks that it needs.
"""

from dataclasses import dataclass

from msgspec import Struct

NO_BLOCK = 0
"""The hash in place of a parent for the first block."""


class IndexedGroup(Struct, frozen=True):
    """The properties of a layer group's blocks, at the group's index in a layout.

    :param kind: the group's :class:`~kvell.memory.GroupKind`.
    :param block_tokens: tokens of a block; 0 if no notices are sent for the group.
    :param window_tokens: tokens of the window or the chunk; 0 without.
    :param model: name of the group's model, if there are several.
    :param short_rope_tokens: longer contexts use another RoPE table, so their blocks differ; 0: the
        model has one table.
    """

    kind: str
    block_tokens: int
    window_tokens: int = 0
    model: str = ""
    short_rope_tokens: int = 0


@dataclass(frozen=True)
class WatchIndex:
    """The command to send each :class:`IndexNotice` from now on.

    The first such command reports no blocks that were cached earlier.  Each later one requests a
    notice of all cached blocks.

    :param with_tokens: whether notices contain the blocks' tokens, from the first command on.
    """

    with_tokens: bool = True


class BlocksStored(Struct, frozen=True, tag=True, omit_defaults=True):
    """Consecutive blocks that are now cached.

    :param group: index of the layer group.
    :param kind: the group's :class:`~kvell.memory.GroupKind`.
    :param parent: hash of the block before the first; ``NO_BLOCK`` if there is none.
    :param hashes: 64 bits each.
    :param tokens: the blocks' tokens, little-endian int32; images' tokens have negative ids.
    :param block_tokens: tokens of a block.
    :param window_tokens: tokens of the window or the chunk; 0 without.
    :param root: digest of the cache root; "" without a salt.
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
    """Blocks that are no longer cached in a group.

    :param group: index of the layer group.
    :param hashes: 64 bits each.
    """

    group: int
    hashes: tuple[int, ...]


class BlocksHeld(Struct, frozen=True, tag=True):
    """All cached blocks of a group.

    :param group: index of the layer group.
    :param hashes: 64 bits each.
    """

    group: int
    hashes: tuple[int, ...]


@dataclass(frozen=True)
class IndexNotice:
    """Changes of an instance's prefix index.

    :param sequence: number of the notice within an incarnation, from 0.
    :param changes: the changes in order.
    :param is_whole: whether the notice contains all cached blocks and replaces earlier notices.
    """

    sequence: int
    changes: tuple[BlocksStored | BlocksRemoved | BlocksHeld, ...]
    is_whole: bool = False
