"""What a node asks of whatever computes attention over the pages that its instance lends."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

RightsWords = npt.NDArray[np.uint64]
"""The table of rights: the word at a number's remainder holds it while it stands."""


class LentAttention(Protocol):
    """Attention over lent pages, for query rows of others (Infinite-LLM §4); from any thread."""

    def lend(self, right: int, debtor: str, pages: Sequence[Sequence[int]]) -> None:
        """Let a debtor ask for a section, while its right stands.

        :param pages: of each group of the layout, in order of position.
        """
        ...

    def end(self, right: int) -> None:
        """Let nobody ask by a right whose word is cleared; nobody reads its pages any more when
        this returns.  No error if nothing is lent under it."""
        ...

    def answer(self, debtor: str, query: bytes) -> bytes:
        """Answer a query, whatever it is."""
        ...

    def close(self) -> None:
        """Let go of the table of rights; nothing is answered after this."""
        ...
