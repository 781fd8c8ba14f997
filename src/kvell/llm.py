"""``kvell.LLM``: a model in this process, with vLLM's call signatures.

It speaks the instance protocol with its engine over a queue, as a front does
over a socket.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvell.clock import Clock, MonotonicClock
from kvell.engine.core.journal import Journal
from kvell.engine.engine import Engine
from kvell.engine.opened import open_served
from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Cancel, Event, Finished, Tokens
from kvell.engine.protocol.pooling import EmbeddingOutput
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.admissible import request_problem, sampling_problem
from kvell.engine.requests.beam_search import BeamSearch, BeamSearchParams
from kvell.engine.requests.pooling import pooling_problem, served_pooling
from kvell.engine.setup.contract import MemoryContract
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething, TryLater
from kvell.llm_jobs import (
    AnswerJob,
    BeamJob,
    BeamSearchOutput,
    EmbeddingJob,
    Job,
    measured,
    one_each,
    raise_if_failed,
)
from kvell.models.images.image_content import ImagePrompt, Tensors
from kvell.models.images.image_store import take_images
from kvell.models.loading.named_models import NamedModel
from kvell.models.sources.progress import Progress, quiet
from kvell.models.text.tokenizer import Tokenizer
from kvell.serving.lone import LocalInstance
from kvell.vocabulary import FinishReason, RequestId

Prompt = str | Mapping[str, Any] | Sequence[int] | npt.NDArray[np.integer[Any]]
"""A text, ``{"prompt": …}`` or ``{"prompt_token_ids": […]}``, or token ids (integers [tokens]).

A mapping may also have ``images``: the tensors that the model's processor makes of the prompt's
images (``{"pixel_values": …, …}``), in the same call as the token ids.  It may have ``model``,
the name of one of several models.
"""


@dataclass(frozen=True)
class RequestOutput:
    """One finished request.

    :param index: index of its prompt.
    :param prompt_token_ids: token ids of the prompt, with the special tokens that were added.
    :param token_ids: token ids of the answer, a stop token included.
    :param text: the answer, without special tokens and without a stop string.
    :param cached_tokens: tokens of the prompt that were found in the prefix cache.
    :param preemptions: how often the request gave up its pages and went on later.
    :param finish_reason: ``stop`` at an end of sequence or a stop string; ``length`` at the limit.
    :param choice: index among the prompt's ``n`` answers.
    :param logprobs: how likely each output token was; None if nobody asked.
    :param prompt_logprobs: the same for each prompt token from the second on.
    :param error: why the request failed, if ``finish_reason`` is ``error``.
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


class LLM:
    """A model, its engine and its tokenizer in this process.

    :param model: ``smollm2``, a local transformers directory, or a hub id. Requests name it so,
        or NAME if it is written ``NAME=…``. Or all settings at once.
    :param cache_dir: directory of the packaged model once converted; ``~/.cache/kvell`` if None.
    :param progress: is told how far loading is; see :data:`kvell.models.sources.progress.Progress`.
    :param journal: records every input of the engine, if given.
    :param incarnation: tells this start of a served instance from its other starts.
    :param weights_fd: descriptor of a memfd in which processes of this host have the models'
        weights once; it must stay open while they load. Not used on a GPU.
    :param clock: measures the seconds of :meth:`stats`; the monotonic clock if None.
    :param settings: further settings, named as in
        :class:`~kvell.engine.setup.engine_settings.EngineSettings` (``kv_memory_bytes``,
        ``memory_bytes``, ``dtype``, ``max_model_len``, …).
    :raises ChangeSomething: naming the argument that cannot work.
    """

    def __init__(
        self,
        model: str | EngineSettings,
        *,
        cache_dir: Path | None = None,
        progress: Progress = quiet,
        journal: Journal | None = None,
        incarnation: int = 0,
        weights_fd: int | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        chosen = EngineSettings(model, **settings) if isinstance(model, str) else model
        opened = open_served(
            chosen, cache_dir or Path.home() / ".cache" / "kvell", progress, weights_fd
        )
        self._first, self._opened = opened.main, {one.name: one for one in opened.named}
        self.engine: Engine = opened.engine(chosen, journal, incarnation)
        self._credits = self.engine.ready().credits
        self._instance = LocalInstance(self.engine)
        self._clock = clock or MonotonicClock()
        self._next_id = 0
        self._stats: dict[str, Any] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The first model's tokenizer."""
        return self._first.tokenizer

    @property
    def contract(self) -> MemoryContract:
        """Where every byte goes; its ``lines()`` are text to print."""
        return self.engine.contract

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        sequential: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; return outputs in the order of the prompts.

        The ``n`` answers to a prompt take its place, one after the other.  A request that fails by
        itself, since the model's logits are no numbers, has an ``error`` and disturbs no other.

        :param prompts: one prompt or several; a list of integers is one prompt of token ids
            only inside another list.
        :param sampling: for all prompts, or one for each; the defaults if None.
        :param sequential: run one request after the other instead of all at once.
        :raises ChangeSomething: if a prompt can never be served; then nothing is run.
        :raises Exception: what a step raised, whichever request it was that it could not compute;
            the others end too.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = one_each(sampling or SamplingParams(), len(many))
        ids = [self._token_ids(prompt) for prompt in many]
        with self._told(ids, many) as told:
            models = [self._model_of(prompt) for prompt in many]
            for prompt, one, name in zip(told, params, models, strict=True):
                self._check(prompt, one, name)
            jobs = [
                AnswerJob(i, tokens, one, self._tokenizer(models[i]), choice, told[i], models[i])
                for i, (tokens, asked) in enumerate(zip(ids, params, strict=True))
                for choice, one in enumerate(asked.choices())
            ]
            started_seconds = self._clock.now_seconds()
            self.engine.core.max_running = 0
            for batch in [[job] for job in jobs] if sequential else [jobs]:
                self._run(batch)
        seconds = self._clock.now_seconds() - started_seconds
        self._stats = measured(jobs, seconds, self.engine.core.max_running)
        return [_output(job) for job in jobs]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: SamplingParams | None = None,
        model: str = "",
    ) -> list[RequestOutput]:
        """Answer a conversation, or several; like :meth:`generate` otherwise.

        :param messages: ``{"role": …, "content": …}`` in order, or a list of such conversations.
            The model's chat template makes the prompt.
        :param model: name of one of several models; "" is the first.
        :raises ChangeSomething: if the model has no chat template, or a prompt can never be served.
        """
        many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        ids = [self._tokenizer(model).encode_chat(m) for m in many]
        return self.generate([{"prompt_token_ids": i, "model": model} for i in ids], sampling)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: str = "last"
    ) -> list[EmbeddingOutput]:
        """Return the vector of every prompt, in the order of the prompts.

        It is that of the prompt's last token behind the final norm, scaled to length one.

        :param prompts: as for :meth:`generate`, without images.
        :param pooling: ``last``; others are refused.
        :raises ChangeSomething: if a prompt or a model has no embeddings; then nothing is run.
        :raises RequestFailed: once all have ended, if a vector is not numbers.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        jobs = [self._embedding_job(prompt, pooling) for prompt in many]
        self._run(jobs)
        return [job.output() for job in jobs]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Find the likeliest answers to every prompt; return them in the order of the prompts.

        Beams share the pages of what they have in common.

        :param prompts: as for :meth:`generate`, without images.
        :raises ChangeSomething: if a prompt can never be served; then nothing is run.
        :raises RequestFailed: if the model's logits are no numbers.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        jobs = [self._beam_job(prompt, params) for prompt in many]
        while step := [request for job in jobs for request in job.requests()]:
            self._run(step)
        return [job.output() for job in jobs]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """Yield one request's text as it is generated; closing the iterator cancels the request.

        Of ``n`` answers only the first is made.

        :raises ChangeSomething: if the prompt can never be served.
        :raises RequestFailed: if the model's logits are no numbers.
        """
        tokens = self._token_ids(prompt)
        [only] = (sampling or SamplingParams()).choices()[:1]
        with self._told([tokens], [prompt]) as told:
            name = self._model_of(prompt)
            self._check(told[0], only, name)
            yield from self._stream(
                AnswerJob(0, tokens, only, self._tokenizer(name), 0, told[0], name)
            )

    def _stream(self, job: AnswerJob) -> Iterator[str]:
        request_id = self._submit(job)
        shown = 0
        try:
            while job.finished is None:
                for event in self._instance.poll():
                    self._deliver(event, {request_id: job})
                if len(job.text) > shown:
                    yield job.text[shown:]
                    shown = len(job.text)
            raise_if_failed(job.finished)
        finally:
            self._instance.send(Cancel(request_id))

    def stats(self) -> dict[str, Any]:
        """Return the last :meth:`generate`'s figures; seconds run from submission to last token."""
        return dict(self._stats)

    # ----------------------------------------------------------------- internal

    def _run(self, jobs: Sequence[Job]) -> None:
        waiting = deque(jobs)
        running: dict[RequestId, Job] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._credits:
                    job = waiting.popleft()
                    running[self._submit(job)] = job
                for event in self._instance.poll():
                    self._deliver(event, running)
                    if isinstance(event, Finished):
                        running.pop(event.request_id, None)
        except BaseException:
            for request_id in running:
                self._instance.send(Cancel(request_id))
            raise

    def _embedding_job(self, prompt: Prompt, pooling: str) -> EmbeddingJob:
        """Return the request for a prompt's vector, checked."""
        asked, name, ids = served_pooling(pooling), self._model_of(prompt), self._token_ids(prompt)
        self._one(name).embeddings.require_served(name or self.engine.contract.model)
        limits, has_images = self.engine.core.rules(name).limits, bool(_images_of(prompt))
        if problem := pooling_problem(ids, limits, has_images=has_images):
            raise problem
        return EmbeddingJob(ids, name, asked)

    def _beam_job(self, prompt: Prompt, params: BeamSearchParams) -> BeamJob:
        """Return a prompt's beam search, checked."""
        name, ids = self._model_of(prompt), self._token_ids(prompt)
        if _images_of(prompt):
            raise ChangeSomething("images", "…", "do not go with a beam search", "leave them out")
        self._check(ImagePrompt(ids, ()), SamplingParams(max_tokens=params.max_tokens), name)
        search = BeamSearch.of(params, self.engine.core.rules(name).eos_token_ids)
        return BeamJob(ids, search, self._tokenizer(name), name)

    def _submit(self, job: Job) -> RequestId:
        request_id = RequestId(f"r{self._next_id}")
        self._next_id += 1
        self._instance.send(job.submission(request_id))
        return request_id

    def _deliver(self, event: Event, jobs: Mapping[RequestId, Job]) -> None:
        if isinstance(event, Tokens) and event.request_id in jobs:
            if jobs[event.request_id].take(event.token_ids, event.logprobs):
                self._instance.send(Cancel(event.request_id))
        elif isinstance(event, PromptLogprobs) and event.request_id in jobs:
            jobs[event.request_id].score(event.logprobs)
        elif isinstance(event, Finished) and event.request_id in jobs:
            if event.reason == "refused":
                raise TryLater(event.message)
            if event.step_failed and (cause := self.engine.failed_steps.last):
                raise cause
            jobs[event.request_id].end(event)

    def _model_of(self, prompt: Prompt) -> str:
        """Return the name of the model that a prompt is for; "" is the first."""
        name = str(prompt.get("model") or "") if isinstance(prompt, Mapping) else ""
        return "" if name == self.engine.contract.model else name

    def _tokenizer(self, model: str) -> Tokenizer:
        """Return a model's tokenizer; "" names the first model."""
        return self._one(model).tokenizer

    def _one(self, model: str) -> NamedModel:
        return self._opened[self.engine.core.rules(model).name] if model else self._first

    def _token_ids(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        tokenizer = self._tokenizer(self._model_of(prompt))
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            prompt = prompt["prompt"] if ids is None else ids
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return np.asarray(prompt, np.int32)

    @contextmanager
    def _told(
        self, ids: Sequence[npt.NDArray[np.int32]], prompts: Sequence[Prompt]
    ) -> Iterator[list[ImagePrompt]]:
        """Give prompts in the engine's form; images are released after the ``with`` body."""
        told: list[ImagePrompt] = []
        try:
            for tokens, prompt in zip(ids, prompts, strict=True):
                told.append(take_images(self.engine.images, tokens, _images_of(prompt)))
            yield told
        finally:
            for known in told:
                if self.engine.images is not None:
                    self.engine.images.release(known)

    def _check(self, prompt: ImagePrompt, sampling: SamplingParams, model: str) -> None:
        """Check what the engine would refuse.

        :raises ChangeSomething: naming the field.
        """
        rules, asked = self.engine.core.rules(model), sampling.max_tokens or 1
        ids, images = prompt.token_ids, prompt.images
        if sampling.stop and not self._tokenizer(model).knows_text:
            why = "needs the model's tokenizer, and it has none"
            raise ChangeSomething("stop", sampling.stop[0], why, "leave it out")
        if problem := (
            sampling_problem(sampling, rules.limits, bool(images))
            or request_problem(ids, images, asked, rules.limits, rules.layout)
        ):
            raise problem
        self.engine.grammars.check(sampling.structured_outputs, model)


def _output(job: AnswerJob) -> RequestOutput:
    """Return a finished request as users see it."""
    done = job.finished
    if done is None:
        raise RuntimeError(f"request {job.index} is not finished")
    return RequestOutput(
        job.index,
        job.prompt.tolist(),
        list(job.token_ids),
        job.text,
        done.cached_tokens,
        done.preemptions,
        "stop" if job.stopped else done.reason,
        job.choice,
        None if job.sampling.logprobs is None else job.logprobs,
        None if job.sampling.prompt_logprobs is None else job.prompt_logprobs,
        "" if job.stopped else done.message,
    )


def _images_of(prompt: Prompt) -> Tensors | None:
    """Return the tensors of a prompt's images, if it has any."""
    return prompt.get("images") if isinstance(prompt, Mapping) else None
