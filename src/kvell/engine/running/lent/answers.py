"""The creditor's side: attention over lent pages for query rows of debtors."""

from collections.abc import Mapping, Sequence

from kvell.mempool.transports.lent_attention import RightsWords
from kvell.models.partials.remote_sections import model_of
from kvell.models.partials.served_layers import ServedLayers
from kvell.models.partials.service import AttentionService

END_SECONDS = 30.0
"""Pages that are read for longer are not reused; reading a section takes milliseconds."""


class SectionAnswers:
    """A :class:`.LentAttention` over the pool of several models' layers.

    :param models: the layers of each model whose kernels are compiled, by the model's number.
    :param words: the table of rights.
    """

    def __init__(self, models: Mapping[int, ServedLayers], words: RightsWords) -> None:
        self._full_groups = {number: model.full_groups for number, model in models.items()}
        self._services = {
            number: AttentionService(model, words) for number, model in models.items()
        }
        self._numbers: dict[str, int] = {}

    def lend(self, right: int, debtor: str, pages: Sequence[Sequence[int]]) -> None:
        """Let a debtor query a section under a right (:class:`.LentAttention`)."""
        for number, service in self._services.items():
            full = self._full_groups[number]
            own = [some if group in full else () for group, some in enumerate(pages)]
            if any(own):
                service.lend(right, self._number(debtor), own)

    def end(self, right: int) -> None:
        """End a right; return once its pages are no longer read (:class:`.LentAttention`).

        :raises RuntimeError: if they are still read after ``END_SECONDS``.
        """
        for service in self._services.values():
            if not service.end(right, END_SECONDS):
                problem = f"what is lent under {right} was read for {END_SECONDS:g} s"
                raise RuntimeError(problem)

    def answer(self, debtor: str, query: bytes) -> bytes:
        service = self._services.get(model_of(query)) or next(iter(self._services.values()), None)
        return b"" if service is None else service.answer(self._number(debtor), query)

    def close(self) -> None:
        self._services = {}

    def _number(self, debtor: str) -> int:
        return self._numbers.setdefault(debtor, len(self._numbers))
