"""The layer groups of an instance, and the blocks of them that a request needs."""

from dataclasses import dataclass

from kvell.engine.protocol.notices import IndexedGroup
from kvell.memory import GroupKind

WHOLE = frozenset({GroupKind.FULL, GroupKind.DROPPING})
"""Groups that need every block from the first on; dropping ones share only what drops nothing."""


@dataclass(frozen=True)
class TreeGroup:
    """A layer group, at its place in the instances' layout.

    :param kind: which earlier tokens its layers read.
    :param block_tokens: of a block; of a state group, the distance between reported states.
    :param window_tokens: as in :class:`kvell.memory.LayerSpec`.
    :param model: which of several models it belongs to.
    :param short_rope_tokens: of the model (:class:`.IndexedGroup`).
    :param required: whether a hit needs the group; notices do not cover the others.
    """

    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0
    model: str = ""
    required: bool = True
    short_rope_tokens: int = 0

    @classmethod
    def of(cls, indexed: IndexedGroup) -> "TreeGroup":
        """Return a group as an instance names it when it starts."""
        kind = GroupKind(indexed.kind)
        size = indexed.block_tokens
        return cls(
            kind,
            size,
            indexed.window_tokens,
            indexed.model,
            required=size > 0,
            short_rope_tokens=indexed.short_rope_tokens,
        )

    def first_block(self, length: int) -> int:
        """Return the first block that a request needs which resumes after ``length`` tokens.

        See ``active_start`` of the policies in :mod:`kvell.prefix.groups.policies`.
        """
        if self.kind is GroupKind.SLIDING:
            return max(0, length - (self.window_tokens - 1)) // self.block_tokens
        if self.kind is GroupKind.CHUNKED:
            return length // self.window_tokens * self.window_tokens // self.block_tokens
        return 0

    def end_block(self, length: int) -> int:
        return -(-length // self.block_tokens)
