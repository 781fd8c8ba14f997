"""The creditor's end: what it lends is attended to here, for query rows of its debtors."""

from collections.abc import Sequence

from kvell.mempool.transports.lent_attention import RightsWords
from kvell.models.fused.partials.rings import BELL_BYTES, aligned_zeros
from kvell.models.fused.partials.served_layers import ServedLayers
from kvell.models.fused.partials.service import AttentionService

END_SECONDS = 30.0
"""Reading a section takes milliseconds; pages that are read for so long are given to nobody."""


class SectionAnswers:
    """A :class:`.LentAttention` over the pool that a model's layers lie in.

    :param words: the table of rights.
    """

    def __init__(self, layers: ServedLayers, words: RightsWords) -> None:
        self._service: AttentionService | None = AttentionService(
            layers, words, aligned_zeros(BELL_BYTES)
        )
        self._numbers: dict[str, int] = {}

    def lend(self, right: int, debtor: str, pages: Sequence[Sequence[int]]) -> None:
        """See :class:`.LentAttention`."""
        if self._service is not None:
            self._service.lend(right, self._number(debtor), pages)

    def end(self, right: int) -> None:
        """See :class:`.LentAttention`.

        :raises RuntimeError: if it is still read after ``END_SECONDS``.
        """
        if self._service is not None and not self._service.end(right, END_SECONDS):
            raise RuntimeError(f"what is lent under {right} was read for {END_SECONDS:g} s")

    def answer(self, debtor: str, query: bytes) -> bytes:
        """See :class:`.LentAttention`."""
        service = self._service
        return b"" if service is None else service.answer(self._number(debtor), query)

    def close(self) -> None:
        """See :class:`.LentAttention`."""
        self._service = None

    def _number(self, debtor: str) -> int:
        """The number by which the compiled service knows an instance."""
        return self._numbers.setdefault(debtor, len(self._numbers))
