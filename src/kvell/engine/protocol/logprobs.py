"""How likely a token was, as it travels from an instance to the caller."""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from msgspec import Struct

from kvell.vocabulary import RequestId

MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for at each position (OpenAI's bound)."""


class TokenLogprobs(Struct, frozen=True, gc=False, array_like=True):
    """Natural logarithms of probabilities at one position.

    They are those of the model: of its logits, before penalties, grammar and temperature.

    :param logprob: of the token that stands there.
    :param rank: 1 for the most likely token.
    :param top: the most likely tokens as (token id, logprob), likeliest first; as many as the
        request asked for.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class KeptLogprobs(Sequence[TokenLogprobs]):
    """The same at many positions, in arrays: a number takes 12 bytes here and 120 in a tuple."""

    def __init__(self, told: Iterable[TokenLogprobs] = ()) -> None:
        self._logprobs, self._ranks, self._ends = array("d"), array("q"), array("q")
        self._top_ids, self._top_logprobs = array("i"), array("d")
        self.extend(told)

    def extend(self, told: Iterable[TokenLogprobs]) -> None:
        """Add further positions."""
        for one in told:
            self._logprobs.append(one.logprob)
            self._ranks.append(one.rank)
            self._top_ids.extend([token for token, _ in one.top])
            self._top_logprobs.extend([logprob for _, logprob in one.top])
            self._ends.append(len(self._top_ids))

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> "KeptLogprobs": ...

    def __getitem__(self, index: int | slice) -> "TokenLogprobs | KeptLogprobs":
        if isinstance(index, slice):
            return KeptLogprobs(self[one] for one in range(*index.indices(len(self))))
        index = range(len(self))[index]
        begin, end = self._ends[index - 1] if index else 0, self._ends[index]
        top = zip(self._top_ids[begin:end], self._top_logprobs[begin:end], strict=True)
        return TokenLogprobs(self._logprobs[index], self._ranks[index], tuple(top))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return NotImplemented
        return all(one == theirs for one, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment] # it grows


def kept(*parts: Sequence[TokenLogprobs]) -> Sequence[TokenLogprobs]:
    """Parts one behind the other; the only one that has anything as it is."""
    told = [part for part in parts if part]
    if len(told) < 2:
        return told[0] if told else ()
    return KeptLogprobs(one for part in told for one in part)


class PromptLogprobs(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Event: how likely tokens of a request's prompt were, in order.

    The first token of a prompt has no probability, since nothing is before it.

    :param first_index: position in the prompt of the first of them, 1 or more.
    """

    request_id: RequestId
    attempt: int
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]
