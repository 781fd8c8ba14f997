"""A counter of an answer's reasoning tokens by the tokens that begin and end the reasoning."""

from collections.abc import Collection, Iterable


class ReasoningCount:
    """The number of tokens between two tags, without the tags.

    :param end: the token that ends the reasoning.
    :param start: the token that begins it; None if the answer begins inside the reasoning.
    :param calls: tokens that begin a call, which ends the reasoning too.
    :ivar tokens: the count so far.
    """

    def __init__(self, end: int, start: int | None, calls: Collection[int] = ()) -> None:
        self._ends, self._start = frozenset((end, *calls)), start
        self._has_ended = False
        self.tokens = 0

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the reasoning tokens among the answer's next tokens."""
        if self._has_ended:
            return
        for token in token_ids:
            if token == self._start:
                self._start = None
            elif self._start is None and token in self._ends:
                self._has_ended = True
                return
            elif self._start is None:
                self.tokens += 1
