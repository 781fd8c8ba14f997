"""Logprobs of tokens, as an instance sends them to the caller."""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from msgspec import Struct

from kvell.vocabulary import RequestId

MAX_LOGPROBS = 20
"""The most alternatives at each position that a request may ask for (OpenAI's bound)."""


class TokenLogprobs(Struct, frozen=True, gc=False, array_like=True):
    """Natural logarithms of probabilities at one position.

    They are computed from the model's logits before penalties, grammar and temperature.

    :param logprob: of the token at the position.
    :param rank: 1 for the most likely token.
    :param top: the most likely tokens as (token id, logprob), likeliest first; as many as the
        request asked for.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class KeptLogprobs(Sequence[TokenLogprobs]):
    """Logprobs of many positions in arrays: a top token takes 12 bytes here and 120 in a tuple."""

    def __init__(self, logprobs: Iterable[TokenLogprobs] = ()) -> None:
        self._logprobs, self._ranks, self._ends = array("d"), array("i"), array("q")
        self._top_ids, self._top_logprobs = array("i"), array("d")
        self.extend(logprobs)

    def extend(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Append positions."""
        if isinstance(logprobs, KeptLogprobs):
            self._extend_arrays(logprobs, 0, len(logprobs))
            return
        for position in logprobs:
            self._logprobs.append(position.logprob)
            self._ranks.append(position.rank)
            self._top_ids.extend([token for token, _ in position.top])
            self._top_logprobs.extend([logprob for _, logprob in position.top])
            self._ends.append(len(self._top_ids))

    def _extend_arrays(self, other: "KeptLogprobs", start: int, stop: int) -> None:
        first = other._ends[start - 1] if start else 0
        last = other._ends[stop - 1] if stop else 0
        shift = len(self._top_ids) - first
        self._ends.extend([end + shift for end in other._ends[start:stop]])
        self._logprobs.extend(other._logprobs[start:stop])
        self._ranks.extend(other._ranks[start:stop])
        self._top_ids.extend(other._top_ids[first:last])
        self._top_logprobs.extend(other._top_logprobs[first:last])

    @property
    def numbers(self) -> int:
        """The number of logprobs: one for each position and for each top token."""
        return len(self._logprobs) + len(self._top_ids)

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> "KeptLogprobs": ...

    def __getitem__(self, index: int | slice) -> "TokenLogprobs | KeptLogprobs":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            part = KeptLogprobs()
            if step == 1:
                part._extend_arrays(self, start, max(start, stop))
            else:
                part.extend(self[i] for i in range(start, stop, step))
            return part
        index = range(len(self))[index]
        begin = self._ends[index - 1] if index else 0
        end = self._ends[index]
        top = zip(self._top_ids[begin:end], self._top_logprobs[begin:end], strict=True)
        return TokenLogprobs(self._logprobs[index], self._ranks[index], tuple(top))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return NotImplemented
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment] # mutable


def count_numbers(logprobs: Sequence[TokenLogprobs]) -> int:
    """Return the number of logprobs of positions: one for each, and for each top token."""
    if isinstance(logprobs, KeptLogprobs):
        return logprobs.numbers
    return len(logprobs) + sum(len(position.top) for position in logprobs)


class PromptLogprobs(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The logprobs of consecutive tokens of a request's prompt.

    A prompt's first token has none, because no token precedes it.

    :param first_index: position in the prompt of ``logprobs[0]``, 1 or more.
    """

    request_id: RequestId
    attempt: int
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]
