"""The outputs of ``kvell.LLM``, with vLLM's names."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvell.engine.protocol.logprobs import TokenLogprobs
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
        ``error`` if the request failed; None while the answer is not complete.
    :param stop_reason: the stop string or stop token that ended the answer; None at the model's
        own end of a sequence, and at the limit.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """The times of one request, in seconds of the clock of its engine.

    :param arrival_time: when the request was given to the engine.
    :param first_token_time: when its first token had been computed; None if there is none.
    :param last_token_time: when its latest token had been computed.
    :param finished_time: when it ended; None while it runs.
    :param num_generation_tokens: tokens of the answer so far.
    """

    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    num_generation_tokens: int

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the arrival to the first token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


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
    :param finish_reason: ``stop`` at an end of sequence or a stop string; ``length`` at the limit;
        None while the answer is not complete.
    :param choice: index among the prompt's ``n`` answers.
    :param logprobs: log probabilities of each output token; None if not requested.
    :param prompt_logprobs: for each token of the prompt, itself and the ``prompt_logprobs``
        likeliest tokens, by token id; None for the first token, which no token precedes.
    :param error: reason of the failure, if ``finish_reason`` is ``error``.
    :param stop_reason: the stop string or stop token that ended the answer; None at the model's
        own end of a sequence, and at the limit.
    :param prompt: the text of the prompt; None if it was given as token ids.
    :param outputs: the ``n`` answers.
    :param finished: whether all answers are complete; only steps of
        :class:`kvell.LLMEngine` return outputs that are not.
    :param metrics: times of the request.
    :param request_id: the index of the prompt as text, or the id that the caller gave.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    cached_tokens: int
    preemptions: int
    finish_reason: FinishReason | None
    choice: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str = ""
    stop_reason: str | int | None = None
    prompt: str | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    metrics: RequestMetrics | None = None
    request_id: str = "0"

    @property
    def num_cached_tokens(self) -> int:
        """``cached_tokens``, by vLLM's name."""
        return self.cached_tokens


def logprobs_by_token(
    token_ids: Iterable[int], logprobs: Sequence[TokenLogprobs], text_of: Callable[[int], str]
) -> list[dict[int, Logprob]]:
    """Return the chosen and the likeliest tokens of each position, by token id.

    :param text_of: returns the text of a token.
    """

    def logprob(token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, text_of(token))

    return [
        {token: logprob(token, entry.logprob, entry.rank)}
        | {
            other: logprob(other, value, rank)
            for rank, (other, value) in enumerate(entry.top, 1)
            if other != token
        }
        for token, entry in zip(token_ids, logprobs, strict=True)
    ]


def delta_of(answer: CompletionOutput, earlier: CompletionOutput | None) -> CompletionOutput:
    """Return what is new in an answer since an earlier output of it."""
    if earlier is None:
        return answer
    start = len(earlier.token_ids)
    return replace(
        answer,
        text=answer.text[len(earlier.text) :],
        token_ids=answer.token_ids[start:],
        logprobs=None if answer.logprobs is None else answer.logprobs[start:],
    )
