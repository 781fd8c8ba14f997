"""Requests in progress as ``kvell.LLM`` follows them, and those that ask for a vector."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.pooling import POOLED, EmbeddingOutput, Pooling, vector_of
from kvell.engine.protocol.sampling_params import MAX_SEED, SamplingParams
from kvell.errors import ChangeSomething, RequestFailed
from kvell.models.images.image_content import ImagePrompt
from kvell.models.text.detokenizer import IncrementalDetokenizer
from kvell.models.text.stop_strings import StopStrings
from kvell.models.text.tokenizer import Tokenizer
from kvell.vocabulary import RequestId


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
    stopped: bool = False

    def __post_init__(self) -> None:
        self._detokenizer = IncrementalDetokenizer(self.tokenizer)
        self._stops = StopStrings(self.sampling.stop)

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
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        text, self.stopped = self._stops.push(self._detokenizer.push(token_ids))
        self.text += text
        return self.stopped

    def end(self, event: Finished) -> None:
        """Take the engine's last event of the request."""
        self.finished = event
        if not self.stopped:
            text, self.stopped = self._stops.push(self._detokenizer.finish())
            self.text += text + ("" if self.stopped else self._stops.finish())


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


def embedding_output(prompt: npt.NDArray[np.int32], done: Finished) -> EmbeddingOutput:
    """The vector that came with a request's end, as users see it."""
    vector: list[float] = vector_of(done.embedding).tolist()
    return EmbeddingOutput(prompt.tolist(), vector, done.cached_tokens, done.preemptions)


def raise_if_failed(done: Finished) -> None:
    """Raise what a request's end says, if it failed.

    :raises RequestFailed: with the engine's words.
    """
    if done.reason == "error":
        raise RequestFailed(done.message)


def sampling_of_each(
    sampling: SamplingParams | Sequence[SamplingParams], count: int
) -> Sequence[SamplingParams]:
    """The sampling parameters of each prompt.

    :param count: of the prompts.
    :raises ChangeSomething: if there are as many neither as prompts nor as one.
    """
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise ChangeSomething(
            "sampling", f"{len(sampling)} items", f"does not match {count} prompts", "give one each"
        )
    return sampling
