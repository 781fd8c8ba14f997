"""What ``kvell.LLM`` returns, with vLLM's names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.models.text.tokenizer import Tokenizer
from kvell.vocabulary import FinishReason


@dataclass(frozen=True)
class Logprob:
    """How likely a token was at one position.

    :param logprob: natural logarithm of its probability.
    :param rank: 1 for the most likely token.
    :param decoded_token: its text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt.

    :param index: index among the prompt's ``n`` answers.
    :param text: the answer, without special tokens and what ended it, unless the sampling says so.
    :param token_ids: token ids of the answer, a stop token included.
    :param cumulative_logprob: natural logarithm of its probability; None without ``logprobs``.
    :param logprobs: for each token, by token id: that token, and as many of the likeliest ones as
        ``logprobs`` asked for.
    :param finish_reason: ``stop`` at an end of sequence or a stop string; ``length`` at the limit;
        ``error`` if the request failed.
    :param stop_reason: the stop string or stop token that ended the answer; None at the model's
        own end of a sequence, and at the limit.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt.

    What is said of an answer is that of the first one; ``outputs`` has all of them.

    :param index: index of its prompt.
    :param prompt_token_ids: token ids of the prompt, with the special tokens that were added.
    :param token_ids: token ids of the answer, a stop token included.
    :param text: the answer, without special tokens and what ended it, unless the sampling says so.
    :param cached_tokens: tokens of the prompt that were found in the prefix cache.
    :param preemptions: how often the request gave up its pages and went on later.
    :param finish_reason: ``stop`` at an end of sequence or a stop string; ``length`` at the limit.
    :param choice: index among the prompt's ``n`` answers.
    :param logprobs: how likely each output token was; None if nobody asked.
    :param prompt_logprobs: the same for each prompt token from the second on.
    :param error: why the request failed, if ``finish_reason`` is ``error``.
    :param stop_reason: the stop string or stop token that ended the answer; None at the model's
        own end of a sequence, and at the limit.
    :param prompt: the text of the prompt; None if it was given as token ids.
    :param outputs: the ``n`` answers.
    :param finished: True, since outputs are returned when all have ended.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    cached_tokens: int
    preemptions: int
    finish_reason: FinishReason
    choice: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str = ""
    stop_reason: str | int | None = None
    prompt: str | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True

    @property
    def request_id(self) -> str:
        """The index of the prompt as a text."""
        return str(self.index)

    @property
    def num_cached_tokens(self) -> int:
        """``cached_tokens``, by vLLM's name."""
        return self.cached_tokens


def logprobs_by_token(
    token_ids: Iterable[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Logprob]]:
    """Return for each position the token there and the likeliest tokens, by token id."""

    def logprob(token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, tokenizer.decode([token], skip_special_tokens=False))

    return [
        {token: logprob(token, one.logprob, one.rank)}
        | {
            other: logprob(other, value, rank)
            for rank, (other, value) in enumerate(one.top, 1)
            if other != token
        }
        for token, one in zip(token_ids, logprobs, strict=True)
    ]
