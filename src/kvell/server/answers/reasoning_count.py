"""A counter of an answer's reasoning tokens by the tokens that begin and end the reasoning."""

from collections.abc import Collection, Iterable


class ReasoningCount:
    """The number of tokens between two tags, without the tags.

    :param end: the token that ends the reasoning.
    :param start: the token that begins it; None if the answer begins inside the reasoning.
    :param calls: tokens that begin a call, which ends reasoning that is not ended behind it.
    """

    def __init__(self, end: int, start: int | None, calls: Collection[int] = ()) -> None:
        self._end, self._start, self._calls = end, start, calls
        self._before_call: int | None = None
        self._has_ended = False
        self._tokens = 0

    @property
    def tokens(self) -> int:
        if self._has_ended or self._before_call is None:
            return self._tokens
        return self._before_call

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the reasoning tokens among the answer's next tokens."""
        if self._has_ended:
            return
        for token in token_ids:
            if token == self._start:
                self._start = None
            elif self._start is None and token == self._end:
                self._has_ended = True
                return
            elif self._start is None:
                if self._before_call is None and token in self._calls:
                    self._before_call = self._tokens
                self._tokens += 1
