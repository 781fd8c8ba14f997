"""Requests in progress as ``kvell.LLM`` follows them, and those that ask for a vector."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.pooling import POOLED, EmbeddingOutput, Pooling, vector_of
from kvell.engine.protocol.sampling_params import MAX_SEED, SamplingParams
from kvell.engine.requests.beam_search import BeamSearch
from kvell.errors import ChangeSomething, RequestFailed
from kvell.models.images.image_content import ImagePrompt, Tensors
from kvell.models.text.answer_text import AnswerText, EndTokens
from kvell.models.text.bad_words import bad_word_tokens
from kvell.models.text.detokenizer import IncrementalDetokenizer
from kvell.models.text.tokenizer import Tokenizer
from kvell.vocabulary import FinishReason, RequestId


@dataclass(frozen=True)
class RequestOutput:
    """One finished request.

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


class Job(Protocol):
    """One request in progress."""

    def submission(self, request_id: RequestId) -> Submit:
        """The command that starts it."""
        ...

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> bool:
        """Take new tokens; return whether the request shall be cancelled."""
        ...

    def score(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take how likely further tokens of the prompt are."""
        ...

    def end(self, event: Finished) -> None:
        """Take the engine's last event of the request."""
        ...


@dataclass(eq=False)
class AnswerJob:
    """One request in progress: its tokens so far and their text."""

    index: int
    prompt: npt.NDArray[np.int32]
    sampling: SamplingParams
    tokenizer: Tokenizer
    choice: int
    told: ImagePrompt
    model: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None

    def __post_init__(self) -> None:
        sampling, tokenizer = self.sampling, self.tokenizer
        sequence = frozenset[int]() if sampling.ignore_eos else tokenizer.eos_token_ids
        asked, shows = frozenset(sampling.stop_token_ids), sampling.include_stop_str_in_output
        detokenizer = IncrementalDetokenizer(tokenizer, sampling.skip_special_tokens, self.prompt)
        ends = EndTokens(sequence, asked, are_shown=shows)
        self._writer = AnswerText(detokenizer, sampling.stop, ends)

    def submission(self, request_id: RequestId) -> Submit:
        """Return the command that starts it, with a seed."""
        sampling, told = self.sampling, self.told
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=secrets.randbelow(MAX_SEED))
        ids = told.token_ids.astype("<i4").tobytes()
        return Submit(request_id, ids, sampling, images=told.images, model=self.model)

    def score(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take how likely further tokens of the prompt are."""
        self.prompt_logprobs.extend(logprobs)

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> bool:
        """Take new tokens; return whether a stop string has just ended the text."""
        if self.stopped:
            return False
        known = self._writer.token_count
        self.text += self._writer.push(token_ids)
        taken = self._writer.token_count - known
        self.token_ids.extend(token_ids[:taken])
        self.logprobs.extend(logprobs[:taken])
        return self.stopped

    def end(self, event: Finished) -> None:
        """Take the engine's last event of the request."""
        self.finished = event
        self.text += self._writer.finish()

    def output(self) -> RequestOutput:
        """Return the finished request as users see it."""
        done = self.finished
        if done is None:
            raise RuntimeError(f"request {self.index} is not finished")
        return RequestOutput(
            self.index,
            self.prompt.tolist(),
            list(self.token_ids),
            self.text,
            done.cached_tokens,
            done.preemptions,
            "stop" if self.stopped else done.reason,
            self.choice,
            None if self.sampling.logprobs is None else self.logprobs,
            None if self.sampling.prompt_logprobs is None else self.prompt_logprobs,
            "" if self.stopped else done.message,
            self.stop_reason,
        )

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._writer.stopped

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the answer; None for anything else."""
        done = self.finished
        is_stop = self.stopped or (done is not None and done.reason == "stop")
        return self._writer.stop_reason if is_stop else None


@dataclass(eq=False)
class EmbeddingJob:
    """A request for a prompt's vector, which comes with its end."""

    prompt: npt.NDArray[np.int32]
    model: str
    pooling: Pooling
    finished: Finished | None = None

    def submission(self, request_id: RequestId) -> Submit:
        """The command that starts it."""
        ids = self.prompt.astype("<i4").tobytes()
        return Submit(request_id, ids, POOLED, model=self.model, pooling=self.pooling)

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> bool:
        """Refuse tokens: none were asked for."""
        raise RuntimeError(f"the engine sent {len(token_ids)} tokens in place of a vector")

    def score(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Refuse scores: none were asked for."""
        raise RuntimeError(f"the engine scored {len(logprobs)} tokens in place of a vector")

    def end(self, event: Finished) -> None:
        """Take the engine's last event, which has the vector."""
        self.finished = event

    def output(self) -> EmbeddingOutput:
        """The finished request as users see it."""
        done = self.finished
        if done is None:
            raise RuntimeError("the request is not finished")
        raise_if_failed(done)
        return embedding_output(self.prompt, done)


@dataclass(frozen=True)
class BeamSequence:
    """One answer of a beam search.

    :param token_ids: a stop token included.
    :param text: the answer, without special tokens.
    :param cumulative_logprob: natural logarithm of its probability.
    :param score: that, divided by the length to the power of ``length_penalty``.
    :param finish_reason: ``stop`` at an end of sequence or a stop token; ``length`` at the limit.
    :param logprobs: how likely each token was, with what ``logprobs`` asked for beside it.
    """

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers to one prompt.

    :param prompt_token_ids: token ids of the prompt, with the special tokens that were added.
    :param sequences: ``beam_width`` of them, the best first.
    :param computed_tokens: of prompt and beams, as far as no cached prefix had them.
    """

    prompt_token_ids: list[int]
    sequences: list[BeamSequence]
    computed_tokens: int


@dataclass(eq=False)
class BeamJob:
    """One prompt's beam search in progress: each step is a request for every beam."""

    prompt: npt.NDArray[np.int32]
    search: BeamSearch
    tokenizer: Tokenizer
    model: str
    computed_tokens: int = 0
    _asked: list[AnswerJob] = field(default_factory=list)

    def requests(self) -> list[AnswerJob]:
        """The next step's requests, one for each beam that runs; none once it is over.

        Those of the step before have ended.
        """
        self._take()
        if self.search.is_over:
            return []
        sampling = self.search.sampling()
        for beam in self.search.running:
            ids = np.concatenate([self.prompt, np.array(beam.token_ids, np.int32)])
            told = ImagePrompt(ids, ())
            self._asked.append(AnswerJob(0, ids, sampling, self.tokenizer, 0, told, self.model))
        return self._asked

    def output(self) -> BeamSearchOutput:
        """The finished search as users see it."""
        sequences = []
        for beam in self.search.finished:
            detokenizer = IncrementalDetokenizer(self.tokenizer, after=self.prompt)
            text = detokenizer.push(beam.token_ids) + detokenizer.finish()
            reason = beam.finish_reason
            assert reason is not None, "an answer has ended"
            numbers = beam.cumulative_logprob, beam.score
            told = list(beam.logprobs)
            sequences.append(BeamSequence(list(beam.token_ids), text, *numbers, reason, told))
        return BeamSearchOutput(self.prompt.tolist(), sequences, self.computed_tokens)

    def _take(self) -> None:
        asked, self._asked = self._asked, []
        if not asked:
            return
        for one in asked:
            assert one.finished is not None, "requests of a step are run before the next"
            raise_if_failed(one.finished)
            self.computed_tokens += len(one.prompt) - one.finished.cached_tokens
        self.search = self.search.after([one.logprobs[0] for one in asked])


def embedding_output(prompt: npt.NDArray[np.int32], done: Finished) -> EmbeddingOutput:
    """The vector that came with a request's end, as users see it."""
    vector: list[float] = vector_of(done.embedding).tolist()
    return EmbeddingOutput(prompt.tolist(), vector, done.cached_tokens, done.preemptions)


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same sampling, with the tokens of its bad words if there is a tokenizer.

    :raises ChangeSomething: if a word has no tokens.
    """
    if not sampling.bad_words or not tokenizer.knows_text:
        return sampling
    encode = partial(tokenizer.encode, add_special_tokens=False)
    forms = bad_word_tokens(sampling.bad_words, lambda text: encode(text).tolist())
    return replace(sampling, bad_words_token_ids=forms)


def raise_if_failed(done: Finished) -> None:
    """Raise what a request's end says, if it failed.

    :raises RequestFailed: with the engine's words.
    """
    if done.reason == "error":
        raise RequestFailed(done.message)


def one_each(
    sampling: SamplingParams | Sequence[SamplingParams], count: int
) -> Sequence[SamplingParams]:
    """Parameters for each of so many prompts, from those for all of them or for each.

    :raises ChangeSomething: if there are not as many as prompts.
    """
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise ChangeSomething(
            "sampling", f"{len(sampling)} items", f"does not match {count} prompts", "give one each"
        )
    return sampling


def measured(jobs: Sequence[AnswerJob], seconds: float, max_running: int) -> dict[str, float]:
    """The figures of requests that have ended (:meth:`kvell.LLM.stats`)."""
    outputs = sum(len(job.token_ids) for job in jobs)
    return {
        "generation_seconds": seconds,
        "max_running": max_running,
        "requests": len(jobs),
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "output_tokens": outputs,
        "output_tokens_per_second": outputs / seconds if seconds else 0.0,
        "cached_tokens": sum(job.finished.cached_tokens for job in jobs if job.finished),
        "preemptions": sum(job.finished.preemptions for job in jobs if job.finished),
    }


def images_of(prompt: object) -> Tensors | None:
    """The tensors of a prompt's images, if it has any."""
    return prompt.get("images") if isinstance(prompt, Mapping) else None
