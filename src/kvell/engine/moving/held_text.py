"""Texts from other instances, for the watch of the prefix index."""

from dataclasses import dataclass
from typing import Self

from kvell.memory import Tokens
from kvell.mempool.holds import Hold


@dataclass(frozen=True, eq=False)
class HeldText:
    """The text of a hold.

    :param text: all tokens, int32.
    """

    text: Tokens
    model: str
    cache_root: str

    @classmethod
    def of(cls, hold: Hold) -> Self:
        return cls(hold.tokens, hold.model, hold.root)

    def tokens(self, start: int, end: int) -> Tokens:
        """Return the tokens from ``start`` to ``end``, int32."""
        return self.text[start:end]
