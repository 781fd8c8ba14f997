"""Log probabilities in OpenAI's two formats: for chat, and the older one for completions.

A token that is a part of a character is written as its bytes: ``\\xf0\\x9f`` in chat, and
``bytes:\\xf0\\x9f`` in completions.  The likeliest tokens of a position include its actual token:
completions add it to the requested ones, in chat it replaces the least likely one.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TypeVar

from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs
from kvell.server.api.bodies.completions import Lazy
from kvell.server.text.text_model import TextModel

Item = TypeVar("Item")
LEAST_LOGPROB = -9999.0
"""The value for minus infinity, which JSON lacks (as in OpenAI's and vLLM's answers)."""


def chat_logprobs(
    model: TextModel, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, object]:
    """Return ``choices[].logprobs`` of a chat answer, or of a piece of it."""
    content = chat_tokens(model, token_ids, logprobs)
    return {"content": Lazy(content), "refusal": None}


def chat_tokens(
    model: TextModel, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Iterator[dict[str, object]]:
    """Yield the elements of ``choices[].logprobs.content``, one for each token."""
    for token, entry in zip(token_ids, logprobs, strict=True):
        likely = _with_own(token, entry, more=0)
        top = [_chat_token(model, other, logprob) for other, logprob in likely]
        yield {**_chat_token(model, token, entry.logprob), "top_logprobs": top}


class Concatenation(Iterable[Item]):
    """Several lists, one after the other, without a copy of them."""

    def __init__(self, *parts: Iterable[Item]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Item]:
        return chain(*self._parts)


def completion_logprobs(
    model: TextModel,
    token_ids: Iterable[int],
    logprobs: Iterable[TokenLogprobs | None],
    offsets: Iterable[int],
) -> dict[str, object]:
    """Return ``choices[].logprobs`` of a completion, or of a piece of it.

    :param token_ids: read several times, as ``logprobs`` are.
    :param logprobs: None for the first token of a prompt, which has no probability.
    :param offsets: start of each token's text in the answer's text, in characters.
    """
    return {
        "text_offset": Lazy(offsets),
        "token_logprobs": Lazy(entry and _finite(entry.logprob) for entry in logprobs),
        "tokens": Lazy(_completion_token(model, token) for token in token_ids),
        "top_logprobs": Lazy(
            entry and _by_text(model, _with_own(token, entry, more=1))
            for token, entry in zip(token_ids, logprobs, strict=True)
        ),
    }


def prompt_logprobs_body(
    model: TextModel, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Lazy:
    """Return vLLM's ``prompt_logprobs``: a map from token ids for each token of the prompt."""
    rest = (
        {
            str(other): {
                "logprob": _finite(value),
                "rank": entry.rank if other == token else rank,
                "decoded_token": model.token_text(other),
            }
            for rank, (other, value) in enumerate(
                dict([*entry.top, (token, entry.logprob)]).items(), start=1
            )
        }
        for token, entry in zip(token_ids[1:], logprobs, strict=False)
    )
    return Lazy(chain([None], rest))


def chat_token_text(model: TextModel, token: int) -> str:
    """Return a token's text, or its bytes if they are not whole characters."""
    data = model.token_bytes(token)
    return model.token_text(token) if _is_text(data) else _escaped(data)


def _chat_token(model: TextModel, token: int, logprob: float) -> dict[str, object]:
    return {
        "token": chat_token_text(model, token),
        "logprob": _finite(logprob),
        "bytes": list(model.token_bytes(token)),
    }


def _completion_token(model: TextModel, token: int) -> str:
    data = model.token_bytes(token)
    return model.token_text(token) if _is_text(data) else f"bytes:{_escaped(data)}"


def _with_own(token: int, entry: TokenLogprobs, *, more: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens, including the actual token if there may be any.

    :param more: number of tokens in addition to the likeliest; 0 replaces the last one.
    """
    if any(other == token for other, _ in entry.top) or not len(entry.top) + more:
        return list(entry.top)
    return [*entry.top[: len(entry.top) - 1 + more], (token, entry.logprob)]


def _by_text(model: TextModel, likely: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Return log probabilities by text, or by id if a likelier token has the same text."""
    by_text: dict[str, float] = {}
    for token, logprob in likely:
        text = _completion_token(model, token)
        by_text[f"token_id:{token}" if text in by_text else text] = _finite(logprob)
    return by_text


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _escaped(data: bytes) -> str:
    """Return bytes that form no character, as OpenAI writes them."""
    return "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


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
