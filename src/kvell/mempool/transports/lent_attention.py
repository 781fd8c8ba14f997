"""The interface of a node to attention over the pages that its instance lends."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

RightsWords = npt.NDArray[np.uint64]
"""The table of rights: a valid number is stored in the word at its remainder."""


class LentAttention(Protocol):
    """Attention over lent pages for query rows of debtors (Infinite-LLM §4), on any thread."""

    def lend(self, right: int, debtor: str, pages: Sequence[Sequence[int]]) -> None:
        """Let a debtor query a section while its right is valid.

        :param pages: the pages of each group of the layout, in order of position.
        """
        ...

    def end(self, right: int) -> None:
        """End queries by a revoked right, if any. No thread reads its pages when this returns."""
        ...

    def answer(self, debtor: str, query: bytes) -> bytes:
        """Answer a query, valid or not."""
        ...

    def close(self) -> None:
        """Release the table of rights. No query is answered after this."""
        ...
