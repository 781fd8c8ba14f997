"""The creditor's side: attention over lent pages for query rows of debtors."""

from collections.abc import Sequence

from kvell.mempool.transports.lent_attention import RightsWords
from kvell.models.fused.partials.served_layers import ServedLayers
from kvell.models.fused.partials.service import AttentionService

END_SECONDS = 30.0
"""Pages that are read for longer are not reused; reading a section takes milliseconds."""


class SectionAnswers:
    """A :class:`.LentAttention` over the pool of a model's layers.

    :param words: the table of rights.
    """

    def __init__(self, layers: ServedLayers, words: RightsWords) -> None:
        self._service: AttentionService | None = AttentionService(layers, words)
        self._numbers: dict[str, int] = {}

    def lend(self, right: int, debtor: str, pages: Sequence[Sequence[int]]) -> None:
        """Let a debtor query a section under a right (:class:`.LentAttention`)."""
        if self._service is not None:
            self._service.lend(right, self._number(debtor), pages)

    def end(self, right: int) -> None:
        """End a right; return once its pages are no longer read (:class:`.LentAttention`).

        :raises RuntimeError: if they are still read after ``END_SECONDS``.
        """
        if self._service is not None and not self._service.end(right, END_SECONDS):
            raise RuntimeError(f"what is lent under {right} was read for {END_SECONDS:g} s")

    def answer(self, debtor: str, query: bytes) -> bytes:
        """Return the answer to a debtor's query (:class:`.LentAttention`)."""
        service = self._service
        return b"" if service is None else service.answer(self._number(debtor), query)

    def close(self) -> None:
        """Stop answering (:class:`.LentAttention`)."""
        self._service = None

    def _number(self, debtor: str) -> int:
        return self._numbers.setdefault(debtor, len(self._numbers))
