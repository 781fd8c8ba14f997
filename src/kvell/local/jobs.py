"""Requests of ``kvell.LLM`` in progress: answers, vectors and beam searches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.pooling import EmbeddingOutput, vector_of
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.beam_search import BeamSearch
from kvell.equivalents.other import show
from kvell.errors import ChangeSomething, RequestFailed
from kvell.local.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    logprobs_by_token,
)
from kvell.models.images.image_content import ImagePrompt
from kvell.models.text.answer_text import AnswerText, EndTokens
from kvell.models.text.bad_words import bad_word_tokens
from kvell.models.text.detokenizer import IncrementalDetokenizer
from kvell.models.text.tokenizer import Tokenizer
from kvell.vocabulary import FinishReason


@dataclass(eq=False)
class AnswerJob:
    """A request for an answer in progress: its tokens so far and their text.

    :param prompt: token ids as the caller gave them; those of ``spec`` name the images.
    :param name: id of the request in outputs; its index if "".
    """

    index: int
    spec: RequestSpec
    prompt: npt.NDArray[np.int32]
    tokenizer: Tokenizer
    choice: int = 0
    prompt_text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None
    name: str = ""
    began_seconds: float = 0.0
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    ended_seconds: float | None = None

    def __post_init__(self) -> None:
        sampling, tokenizer = self.spec.sampling, self.tokenizer
        sequence = frozenset[int]() if sampling.ignore_eos else tokenizer.eos_token_ids
        stop_ids = frozenset(sampling.stop_token_ids)
        shows = sampling.include_stop_str_in_output
        detokenizer = IncrementalDetokenizer(tokenizer, sampling.skip_special_tokens, self.prompt)
        ends = EndTokens(sequence, stop_ids, are_shown=shows)
        self._writer = AnswerText(detokenizer, sampling.stop, ends, sampling.min_tokens)

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Append log probabilities of further tokens of the prompt."""
        self.prompt_logprobs.extend(logprobs)

    def begin(self, now_seconds: float) -> None:
        """Note that the request has been submitted."""
        self.began_seconds = now_seconds

    def take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now_seconds: float
    ) -> bool:
        """Append new tokens; return whether a stop string has just ended the text."""
        if self.stopped:
            return False
        if self.first_token_seconds is None:
            self.first_token_seconds = now_seconds
        self.last_token_seconds = now_seconds
        count_before = self._writer.token_count
        self.text += self._writer.push(token_ids)
        taken = self._writer.token_count - count_before
        self.token_ids.extend(token_ids[:taken])
        self.logprobs.extend(logprobs[:taken])
        return self.stopped

    def end(self, event: Finished, now_seconds: float) -> None:
        self.finished, self.ended_seconds = event, now_seconds
        self.text += self._writer.finish()

    def output(self) -> RequestOutput:
        done = self.finished
        return RequestOutput(
            self.index,
            self.prompt.tolist(),
            list(self.token_ids),
            self.text,
            0 if done is None else done.cached_tokens,
            0 if done is None else done.preemptions,
            self.finish_reason,
            self.choice,
            None if self.spec.sampling.logprobs is None else list(self.logprobs),
            self._scores(),
            "" if self.stopped or done is None else done.message,
            self.stop_reason,
            self.prompt_text,
            [self.completion()],
            done is not None,
            RequestMetrics(
                self.began_seconds,
                self.first_token_seconds,
                self.last_token_seconds,
                self.ended_seconds,
                len(self.token_ids),
            ),
            self.name or str(self.index),
        )

    def completion(self) -> CompletionOutput:
        likely = None if self.spec.sampling.logprobs is None else self.logprobs
        return CompletionOutput(
            self.choice,
            self.text,
            list(self.token_ids),
            None if likely is None else sum(entry.logprob for entry in likely),
            None if likely is None else logprobs_by_token(self.token_ids, likely, self._text_of),
            self.finish_reason,
            self.stop_reason,
        )

    def _text_of(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _scores(self) -> list[dict[int, Logprob] | None] | None:
        if self.spec.sampling.prompt_logprobs is None:
            return None
        scored = self.prompt[1 : len(self.prompt_logprobs) + 1].tolist()
        return [None, *logprobs_by_token(scored, self.prompt_logprobs, self._text_of)]

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason of the end; None while the request runs."""
        if self.finished is None:
            return None
        return "stop" if self.stopped else self.finished.reason

    @property
    def stopped(self) -> bool:
        return self._writer.stopped

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the answer; None for other ends."""
        done = self.finished
        is_stop = self.stopped or (done is not None and done.reason == "stop")
        return self._writer.stop_reason if is_stop else None


@dataclass(eq=False)
class EmbeddingJob:
    """A request for a prompt's vector, which is in its last event."""

    spec: RequestSpec
    name: str = "0"
    finished: Finished | None = None

    def begin(self, now_seconds: float) -> None:
        """Do nothing: a vector has no times."""

    def take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now_seconds: float
    ) -> bool:
        """Raise an error: no tokens were requested."""
        raise RuntimeError(f"the engine sent {len(token_ids)} tokens in place of a vector")

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        raise RuntimeError(f"the engine scored {len(logprobs)} tokens in place of a vector")

    def end(self, event: Finished, now_seconds: float) -> None:
        self.finished = event

    def output(self) -> EmbeddingOutput:
        done = self.finished
        if done is None:
            raise RuntimeError("the request is not finished")
        raise_if_failed(done)
        return embedding_output(self.spec.token_ids, done, self.name)


Job = AnswerJob | EmbeddingJob
"""A request in progress."""


@dataclass(frozen=True)
class BeamSequence:
    """One answer of a beam search.

    :param token_ids: token ids of the answer, including a stop token.
    :param text: the answer, without special tokens.
    :param cumulative_logprob: natural logarithm of its probability.
    :param score: ``cumulative_logprob`` divided by the length to the power of ``length_penalty``.
    :param finish_reason: ``stop`` at an end of sequence or a stop token; ``length`` at the limit.
    :param logprobs: log probability of each token and of the likeliest alternatives.
    """

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs]

    @property
    def cum_logprob(self) -> float:
        """``cumulative_logprob``, by vLLM's name."""
        return self.cumulative_logprob

    @property
    def tokens(self) -> list[int]:
        """``token_ids``, by vLLM's name."""
        return self.token_ids


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers to one prompt.

    :param prompt_token_ids: token ids of the prompt, with added special tokens.
    :param sequences: ``beam_width`` answers, the best first.
    :param computed_tokens: tokens of prompt and beams that no cached prefix had.
    """

    prompt_token_ids: list[int]
    sequences: list[BeamSequence]
    computed_tokens: int


@dataclass(eq=False)
class BeamJob:
    """One prompt's beam search in progress: a step is a request for each beam.

    :param new_spec: makes a request of a prompt, its sampling and its model.
    """

    prompt: npt.NDArray[np.int32]
    search: BeamSearch
    tokenizer: Tokenizer
    model: str
    new_spec: Callable[[ImagePrompt, SamplingParams, str], RequestSpec]
    computed_tokens: int = 0
    _asked: list[AnswerJob] = field(default_factory=list)

    def requests(self) -> list[AnswerJob]:
        """Return the next step's requests, one per running beam; none once the search has ended.

        The requests of the previous step must have ended.
        """
        self._take()
        if self.search.is_over:
            return []
        sampling = self.search.sampling()
        for beam in self.search.running:
            ids = np.concatenate([self.prompt, np.array(beam.token_ids, np.int32)])
            spec = self.new_spec(ImagePrompt(ids, ()), sampling, self.model)
            self._asked.append(AnswerJob(0, spec, ids, self.tokenizer))
        return self._asked

    def output(self) -> BeamSearchOutput:
        sequences = []
        for beam in self.search.finished:
            detokenizer = IncrementalDetokenizer(self.tokenizer, after=self.prompt)
            text = detokenizer.push(beam.token_ids) + detokenizer.finish()
            reason = beam.finish_reason
            assert reason is not None, "an answer has ended"
            numbers = beam.cumulative_logprob, beam.score
            logprobs = list(beam.logprobs)
            sequences.append(BeamSequence(list(beam.token_ids), text, *numbers, reason, logprobs))
        return BeamSearchOutput(self.prompt.tolist(), sequences, self.computed_tokens)

    def _take(self) -> None:
        jobs, self._asked = self._asked, []
        if not jobs:
            return
        for job in jobs:
            assert job.finished is not None, "requests of a step are run before the next"
            raise_if_failed(job.finished)
            self.computed_tokens += len(job.prompt) - job.finished.cached_tokens
        self.search = self.search.after([job.logprobs[0] for job in jobs])


def embedding_output(
    prompt: npt.NDArray[np.int32], done: Finished, request_id: str
) -> EmbeddingOutput:
    vector: list[float] = vector_of(done.embedding).tolist()
    counts = done.cached_tokens, done.preemptions
    return EmbeddingOutput(prompt.tolist(), vector, *counts, request_id)


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the sampling parameters with the tokens of their bad words, if there is a tokenizer.

    :raises ChangeSomething: if a word has no tokens.
    """
    if not sampling.bad_words or not tokenizer.knows_text:
        return sampling
    encode = partial(tokenizer.encode, add_special_tokens=False)
    forms = bad_word_tokens(sampling.bad_words, lambda text: encode(text).tolist())
    return replace(sampling, bad_words_token_ids=forms)


def raise_if_failed(done: Finished) -> None:
    """Raise the error of a request that failed.

    :raises RequestFailed: with the engine's message.
    """
    if done.reason == "error":
        raise RequestFailed(done.message)


Sampling = SamplingParams | Sequence[SamplingParams] | None
"""The parameters of all prompts, or a list with those of each; None: the models' defaults."""
Given = TypeVar("Given")


def chosen_sampling(sampling: Given, sampling_params: Given) -> Given:
    """Return the parameters of a call, which may be given under either of two names.

    :raises ChangeSomething: if both are given.
    """
    if sampling is not None and sampling_params is not None:
        problem = "is given as well as sampling"
        raise ChangeSomething("sampling_params", "…", problem, "give one of the two")
    return sampling if sampling_params is None else sampling_params


def one_each(sampling: Sampling, defaults: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    """Return the parameters of each prompt.

    :raises ChangeSomething: if their number or type is wrong.
    """
    if sampling is None:
        return defaults
    if isinstance(sampling, SamplingParams):
        return [sampling.clone()] * len(defaults)  # callers may assign fields of theirs later
    if not isinstance(sampling, list | tuple):
        raise _no_params(sampling)
    if len(sampling) != len(defaults):
        value, problem = f"{len(sampling)} items", f"does not match {len(defaults)} prompts"
        raise ChangeSomething("sampling_params", value, problem, "give one each")
    for params in sampling:
        if not isinstance(params, SamplingParams):
            raise _no_params(params)
    return [params.clone() for params in sampling]


def _no_params(value: object) -> ChangeSomething:
    problem, remedy = "is not SamplingParams", "give SamplingParams(…), or one for each prompt"
    return ChangeSomething("sampling_params", show(value), problem, remedy)


def output_of(jobs: Sequence[AnswerJob]) -> RequestOutput:
    """Return the answers to one prompt, in order."""
    first, *others = [job.output() for job in jobs]
    return replace(
        first,
        outputs=[*first.outputs, *(other.outputs[0] for other in others)],
        finished=first.finished and all(other.finished for other in others),
    )


def several(prompts: object) -> list[object]:
    """Return the list of prompts of a call with one or several prompts.

    :raises ChangeSomething: if the value is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        problem, remedy = "are not prompts", "give a text, or a list of texts"
        raise ChangeSomething("prompts", show(prompts), problem, remedy)
    return list(prompts)


def measure(jobs: Sequence[AnswerJob], seconds: float, max_running: int) -> dict[str, float]:
    """Return the figures of requests that have ended (:meth:`kvell.LLM.stats`)."""
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
