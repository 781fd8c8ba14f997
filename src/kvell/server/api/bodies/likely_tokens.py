"""Log probabilities of an answer's tokens, kept in arrays and written lazily."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs
from kvell.server.api.bodies.logprobs import chat_token_text, chat_tokens
from kvell.server.api.bodies.pieces import Lazy
from kvell.server.text.text_model import TextModel

FEWEST_AT_ONCE = 32
"""Pending tokens in which a text is looked for first."""


class LikelyTokens(Iterable[dict[str, object]]):
    """Tokens with their log probabilities; iterating makes the elements of ``logprobs``."""

    def __init__(self, model: TextModel | None = None) -> None:
        self._model = model
        self._token_ids = array("i")
        self._logprobs = KeptLogprobs()

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[dict[str, object]]:
        if self._model is None:
            return iter(())
        return chat_tokens(self._model, self._token_ids, self._logprobs)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Append tokens."""
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)

    def append_tokens_of(self, other: "LikelyTokens") -> None:
        self._model = self._model or other._model
        self.append(other._token_ids, other._logprobs)

    def part(self, start: int, stop: int) -> "LikelyTokens":
        """Return a copy of the tokens from ``start`` to ``stop``."""
        part = LikelyTokens(self._model)
        part.append(self._token_ids[start:stop], self._logprobs[start:stop])
        return part

    def to_list(self) -> Lazy | list[object]:
        return Lazy(self) if self._token_ids else []


class PendingTokens:
    """Tokens whose text has not been sent, in order.

    Taking the tokens of a text costs as much as it takes, however many stay.
    """

    def __init__(self, model: TextModel | None) -> None:
        self._model = model
        self._tokens = LikelyTokens(model)
        self._texts: list[str] = []
        self._first = 0

    def __len__(self) -> int:
        return len(self._texts) - self._first

    def append(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Append tokens that have log probabilities."""
        if logprobs and self._model is not None:
            self._tokens.append(token_ids, logprobs)
            self._texts += [chat_token_text(self._model, token) for token in token_ids]

    def drop_all(self) -> None:
        """Forget all tokens."""
        self._tokens = LikelyTokens(self._model)
        self._texts = []
        self._first = 0

    def take_all(self) -> LikelyTokens:
        """Take all tokens."""
        taken = self._tokens.part(self._first, len(self._texts))
        self.drop_all()
        return taken

    def take(self, text: str, *, is_first: bool) -> LikelyTokens:
        """Take the tokens up to a text's end.

        :param is_first: whether the text is the first of a message: the last occurrence of it
            counts, and tokens before it are dropped.
        """
        chunk, place = self._search(text, is_first=is_first)
        if place < 0:  # a token that is a part of a character has no text of its own
            return self.take_all()
        ends = list(accumulate(map(len, chunk)))
        begin = bisect_right(ends, place) if is_first else 0
        end = bisect_left(ends, place + len(text)) + 1
        taken = self._tokens.part(self._first + begin, self._first + end)
        self._drop(end)
        return taken

    def _search(self, text: str, *, is_first: bool) -> tuple[list[str], int]:
        """Return the texts of the tokens that were searched, and the place of a text in them."""
        count = len(self) if is_first else FEWEST_AT_ONCE
        while True:
            chunk = self._texts[self._first : self._first + count]
            joined = "".join(chunk)
            place = joined.rfind(text) if is_first else joined.find(text)
            if place >= 0 or count >= len(self):
                return chunk, place
            count *= 2

    def _drop(self, count: int) -> None:
        """Forget the first tokens; their memory is freed once they are the larger part."""
        self._first += count
        if self._first > len(self):
            self._tokens = self._tokens.part(self._first, len(self._texts))
            del self._texts[: self._first]
            self._first = 0
