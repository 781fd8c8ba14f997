"""``kvell.LLM``: a model in this process, with vLLM's call signatures.

It speaks the instance protocol with its engine over a queue, as a front does
over a socket.
"""

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvell.clock import Clock, MonotonicClock
from kvell.device.process_size import process_bytes
from kvell.engine.assembly import EngineOptions, build_engine, load_model
from kvell.engine.core.journal import Journal
from kvell.engine.engine import Engine
from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Cancel, Event, Finished, Submit, Tokens
from kvell.engine.protocol.pooling import EmbeddingOutput
from kvell.engine.protocol.sampling_params import MAX_SEED, SamplingParams
from kvell.engine.requests.admissible import request_problem, sampling_problem
from kvell.engine.requests.pooling import pooling_problem, served_pooling
from kvell.engine.setup.contract import MemoryContract
from kvell.engine.setup.several_models import ServedModel
from kvell.errors import ChangeSomething, TryLater
from kvell.llm_jobs import EmbeddingJob, Job, raise_if_failed
from kvell.memory import Manager
from kvell.mempool.rendezvous import Rendezvous
from kvell.models.families.draft_model import check_draft
from kvell.models.images.image_content import ImagePrompt, Tensors
from kvell.models.images.image_store import take_images
from kvell.models.loading.loading import check_model
from kvell.models.loading.named_models import NamedModel, open_named
from kvell.models.sources.progress import Progress, quiet
from kvell.models.sources.source import resolve_model
from kvell.models.text.detokenizer import IncrementalDetokenizer
from kvell.models.text.stop_strings import StopStrings
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
        or NAME if it is written ``NAME=…``.
    :param beside: further models, written likewise, each independent of the others. All models
        share the steps and the KV pool, which follows the load.
    :param memory_bytes: of weights, KV cache and activations together. With a fused pass, KV cache
        and activations share what the weights leave, and each takes what the other does not
        need; otherwise a part of it is reserved for activations.
    :param kv_memory_bytes: size of the KV pool; with ``memory_bytes``, the KV's initial share.
    :param cpu_buffer_bytes: additional host memory in which preempted requests keep their pages
        if that is quicker than recomputing their tokens; None for no buffer.
    :param slo_ttft_seconds: limit to a request's first token. With either objective, prompts go
        ahead of decodes, whose pages wait in the CPU buffer: they use more of it while first
        tokens are late, less while answers are slow. None sets no limit.
    :param slo_tpot_seconds: limit for each further token of an answer, on average.
    :param dtype: dtype of weights and activations: ``float32``, ``bfloat16``, or ``auto`` for
        what the model's files say.
    :param kv_cache_dtype: dtype of stored keys and values: ``auto`` (as ``dtype``), ``float32``,
        ``bfloat16``, ``fp8`` or ``int8``.
    :param quantization: storage of weights: ``none`` (as ``dtype``), ``int8`` or ``int4``, for
        models with a fused pass. Blocks of four bits in a model's files are served as they are;
        a draft model keeps its own dtype.
    :param kv_budget: tokens of a long prompt that each layer of full attention keeps once it is
        computed (``"1024"``), or keeps on average, lower layers more (``"pyramid:1024"``).
        None keeps all. Answers change; prompts beyond the budget share no prefix.
    :param device: ``cpu`` or ``cuda``.
    :param max_model_len: most tokens of a request, prompt and answer together. None takes the
        longest request that the model and the pool allow.
    :param max_num_batched_tokens: most tokens that a step computes, of all requests together.
    :param max_num_seqs: most requests that run at once.
    :param manager: how the pool is shared between layer groups; see
        :data:`kvell.memory.Manager`.
    :param num_speculative_tokens: draft tokens of a request per step, at most. Answers stay
        the same.
    :param speculative_model: a smaller draft model with the same vocabulary, named like
        ``model``; its keys and values lie in the same pool. Without it, draft tokens are those
        that followed an earlier occurrence of the last ``prompt_lookup_min`` to
        ``prompt_lookup_max`` tokens.
    :param prompt_lookup_max: most tokens that are looked up.
    :param prompt_lookup_min: fewest tokens that are looked up.
    :param enforce_eager: run transformers' own code layer by layer even if the model has a fused
        pass (dense ones and Falcon-H1, in float32 or bfloat16 on a CPU); slower, as exact.
    :param async_scheduling: plan a step while the previous one runs, if the model allows it;
        answers stay the same.
    :param enable_chunked_prefill: cut prompts into chunks that share steps with decodes. Else a
        step computes whole prompts or decodes, prompts first; then ``max_num_batched_tokens``
        must be at least ``max_model_len``, and is its limit if that is None.
    :param cache_dir: directory of the packaged model once converted; ``~/.cache/kvell`` if None.
    :param progress: is told how far loading is; see :data:`kvell.models.sources.progress.Progress`.
    :param journal: records every input of the engine, if given.
    :param incarnation: tells this start of a served instance from its other starts.
    :param memory_parts: instances that start at once on this machine; each may have this part
        of what is free.
    :param weights_fd: descriptor of a memfd in which processes of this host have the models'
        weights once; it must stay open while they load. Not used on a GPU.
    :param pool_place: where a served instance meets others; None: nowhere.
    :param clock: measures the seconds of :meth:`stats`; the monotonic clock if None.
    :raises ChangeSomething: naming the argument that cannot work.
    """

    def __init__(
        self,
        model: str,
        *,
        beside: Sequence[str] = (),
        memory_bytes: int | None = None,
        kv_memory_bytes: int | None = None,
        cpu_buffer_bytes: int | None = None,
        slo_ttft_seconds: float | None = None,
        slo_tpot_seconds: float | None = None,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        quantization: str = "none",
        kv_budget: str | None = None,
        device: str = "cpu",
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        manager: Manager = "kvell",
        num_speculative_tokens: int = 0,
        speculative_model: str | None = None,
        prompt_lookup_max: int = 5,
        prompt_lookup_min: int = 2,
        enforce_eager: bool = False,
        async_scheduling: bool = False,
        enable_chunked_prefill: bool = True,
        cache_dir: Path | None = None,
        progress: Progress = quiet,
        journal: Journal | None = None,
        incarnation: int = 0,
        memory_parts: int = 1,
        weights_fd: int | None = None,
        pool_place: Rendezvous | None = None,
        clock: Clock | None = None,
    ) -> None:
        floor_bytes = process_bytes()
        cache_dir = cache_dir or Path.home() / ".cache" / "kvell"
        first, *others = open_named(model, beside, cache_dir, progress)
        self._first, self._opened = first, {one.name: one for one in (first, *others)}
        load = partial(
            load_model,
            dtype=dtype,
            device=device,
            progress=progress,
            enforce_eager=enforce_eager,
            weights_fd=weights_fd,
        )
        draft_path: Path | None = None
        if speculative_model is not None:
            draft_path = resolve_model(speculative_model, cache_dir, progress)
            check_model(draft_path)
            check_draft(draft_path, first.path, first.tokenizer, speculative_model)
        self.engine: Engine = build_engine(
            load(
                first.path,
                kv_cache_dtype=kv_cache_dtype,
                kv_budget=kv_budget,
                quantization=quantization,
            ),
            first.name,
            EngineOptions(
                kv_memory_bytes,
                max_model_len,
                max_num_batched_tokens,
                max_num_seqs,
                manager,
                num_speculative_tokens=num_speculative_tokens,
                prompt_lookup_max=prompt_lookup_max,
                prompt_lookup_min=prompt_lookup_min,
                memory_bytes=memory_bytes,
                cpu_buffer_bytes=cpu_buffer_bytes,
                slo_ttft_seconds=slo_ttft_seconds,
                slo_tpot_seconds=slo_tpot_seconds,
                async_scheduling=async_scheduling,
                enable_chunked_prefill=enable_chunked_prefill,
                memory_parts=memory_parts,
                pool_place=pool_place,
            ),
            first.eos_token_ids,
            journal,
            incarnation,
            draft=load(draft_path, kv_cache_dtype=kv_cache_dtype) if draft_path else None,
            beside=[
                ServedModel(
                    one.name,
                    load(one.path, kv_cache_dtype=kv_cache_dtype, quantization=quantization),
                    one.eos_token_ids,
                    one.tokenizer_json,
                )
                for one in others
            ],
            floor_bytes=floor_bytes,
            tokenizer_json=first.tokenizer_json,
        )
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
        params = _each(sampling or SamplingParams(), len(many))
        ids = [self._token_ids(prompt) for prompt in many]
        with self._told(ids, many) as told:
            models = [self._model_of(prompt) for prompt in many]
            for prompt, one, name in zip(told, params, models, strict=True):
                self._check(prompt, one, name)
            jobs = [
                _Job(i, tokens, one, self._tokenizer(models[i]), choice, told[i], models[i])
                for i, (tokens, asked) in enumerate(zip(ids, params, strict=True))
                for choice, one in enumerate(asked.choices())
            ]
            started_seconds = self._clock.now_seconds()
            self.engine.core.max_running = 0
            for batch in [[job] for job in jobs] if sequential else [jobs]:
                self._run(batch)
        self._stats = self._measure(jobs, self._clock.now_seconds() - started_seconds)
        return [job.output() for job in jobs]

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
            yield from self._stream(_Job(0, tokens, only, self._tokenizer(name), 0, told[0], name))

    def _stream(self, job: "_Job") -> Iterator[str]:
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

    def _measure(self, jobs: Sequence["_Job"], seconds: float) -> dict[str, Any]:
        outputs = sum(len(job.token_ids) for job in jobs)
        return {
            "generation_seconds": seconds,
            "max_running": self.engine.core.max_running,
            "requests": len(jobs),
            "prompt_tokens": sum(len(job.prompt) for job in jobs),
            "output_tokens": outputs,
            "output_tokens_per_second": outputs / seconds if seconds else 0.0,
            "cached_tokens": sum(job.finished.cached_tokens for job in jobs if job.finished),
            "preemptions": sum(job.finished.preemptions for job in jobs if job.finished),
        }


@dataclass(eq=False)
class _Job:
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
        )


def _images_of(prompt: Prompt) -> Tensors | None:
    """Return the tensors of a prompt's images, if it has any."""
    return prompt.get("images") if isinstance(prompt, Mapping) else None


def _each(
    sampling: SamplingParams | Sequence[SamplingParams], count: int
) -> Sequence[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise ChangeSomething(
            "sampling", f"{len(sampling)} items", f"does not match {count} prompts", "give one each"
        )
    return sampling
