"""Texts that came from another instance, as watchers of the prefix index want them."""

from dataclasses import dataclass
from typing import Self

from kvell.memory import Tokens
from kvell.mempool.holds import Hold


@dataclass(frozen=True, eq=False)
class HeldText:
    """A text that a hold has.

    :param text: int32, all of it.
    """

    text: Tokens
    model: str
    cache_root: str

    @classmethod
    def of(cls, hold: Hold) -> Self:
        """The text of a hold."""
        return cls(hold.tokens, hold.model, hold.root)

    def tokens(self, start: int, end: int) -> Tokens:
        """Some of its tokens, int32."""
        return self.text[start:end]
