"""The outputs of ``kvell.LLM``, with vLLM's names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.models.text.tokenizer import Tokenizer
from kvell.vocabulary import FinishReason


@dataclass(frozen=True)
class Logprob:
    """The log probability of a token at one position.

    :param logprob: natural logarithm of its probability.
    :param rank: 1 for the most likely token.
    :param decoded_token: text of the token.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt.

    :param index: index among the prompt's ``n`` answers.
    :param text: the answer; the sampling determines whether it includes special tokens and the
        stop string.
    :param token_ids: token ids of the answer, including a stop token.
    :param cumulative_logprob: natural logarithm of its probability; None without ``logprobs``.
    :param logprobs: for each position, the chosen token and the ``logprobs`` likeliest tokens, by
        token id.
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

    Fields of an answer are those of the first answer; ``outputs`` has all answers.

    :param index: index of its prompt.
    :param prompt_token_ids: token ids of the prompt, with added special tokens.
    :param token_ids: token ids of the answer, including a stop token.
    :param text: the answer; the sampling determines whether it includes special tokens and the
        stop string.
    :param cached_tokens: prompt tokens that were in the prefix cache.
    :param preemptions: number of times that the request was preempted.
    :param finish_reason: ``stop`` at an end of sequence or a stop string; ``length`` at the limit.
    :param choice: index among the prompt's ``n`` answers.
    :param logprobs: log probabilities of each output token; None if not requested.
    :param prompt_logprobs: those of each prompt token from the second on.
    :param error: reason of the failure, if ``finish_reason`` is ``error``.
    :param stop_reason: the stop string or stop token that ended the answer; None at the model's
        own end of a sequence, and at the limit.
    :param prompt: the text of the prompt; None if it was given as token ids.
    :param outputs: the ``n`` answers.
    :param finished: always True, since outputs are returned when all requests have ended.
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
        """The index of the prompt as text."""
        return str(self.index)

    @property
    def num_cached_tokens(self) -> int:
        """``cached_tokens``, by vLLM's name."""
        return self.cached_tokens


def logprobs_by_token(
    token_ids: Iterable[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Logprob]]:
    """Return the chosen and the likeliest tokens of each position, by token id."""

    def logprob(token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, tokenizer.decode([token], skip_special_tokens=False))

    return [
        {token: logprob(token, entry.logprob, entry.rank)}
        | {
            other: logprob(other, value, rank)
            for rank, (other, value) in enumerate(entry.top, 1)
            if other != token
        }
        for token, entry in zip(token_ids, logprobs, strict=True)
    ]
