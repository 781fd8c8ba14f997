"""``kvell.AsyncEngine``: instances in separate processes, for asyncio, without HTTP.

It is ``kvell serve`` without its HTTP server, with vLLM's call signatures::

    async with AsyncEngine("smollm2", instances="mixed=2") as engine:
        async for output in engine.generate("What is a page?", SamplingParams(max_tokens=16)):
            print(output.text)
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from kvell.cluster.instances import (
    check_start,
    checked_counts,
    parse_instances,
)
from kvell.cluster.routing.policies import DEFAULT_ROUTING
from kvell.cluster.steering.relief import DEFAULT_RELIEF, Relief
from kvell.engine.arg_utils import EngineArgs
from kvell.engine.protocol.given import given_prompt
from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.pooling import POOLED, EmbeddingOutput, Pooling, PoolingParams
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.engine.protocol.sampling_params import RequestOutputKind, SamplingParams
from kvell.engine.protocol.statistics import Stats
from kvell.engine.sampling.model_defaults import GenerationConfig, limit_answer
from kvell.engine.setup.arguments.settings_from import settings_from
from kvell.equivalents.arguments import CALL_OTHERS, ENGINE_OTHERS
from kvell.equivalents.other import check_others
from kvell.errors import ChangeSomething
from kvell.fleet.fleet import MemberStatus
from kvell.fleet.instance.command import instance_command
from kvell.fleet.instance.price_settings import PriceSettings
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.front.front import Front
from kvell.front.routes import conversation_key, prompt_key
from kvell.local.jobs import chosen_sampling, embedding_output, one_each
from kvell.local.outputs import CompletionOutput, Logprob, logprobs_by_token
from kvell.mempool.rendezvous import PageTransport, PdCaching
from kvell.models.sources.progress import Progress, quiet
from kvell.server.text.embeddings import embed
from kvell.server.text.lanes import TextWork
from kvell.server.text.named_texts import TextOptions, texts_of
from kvell.server.text.text_bounds import chars_within
from kvell.server.text.text_encoder import TextEncoder
from kvell.server.text.text_model import TextModel
from kvell.server.text.text_stream import TextDelta, WholeAnswer, text_deltas
from kvell.vocabulary import RequestId

Prompt = str | Mapping[str, Any] | Sequence[int] | NDArray[np.integer[Any]]
"""A text, ``{"prompt": …}`` or ``{"prompt_token_ids": […]}``, or token ids.  A mapping may also
have ``model``, the name of one of several models."""


@dataclass(frozen=True)
class StreamedOutput:
    """The output of a request: so far, or what is new (:class:`kvell.RequestOutputKind`).

    :param request_id: id of the request.
    :param prompt_token_ids: token ids of the prompt, with added special tokens.
    :param token_ids: token ids of the answer so far.
    :param text: text of all tokens so far, without an incomplete last character.
    :param finish_reason: None until the last output.
    :param cached_tokens: prompt tokens that were in a cache; 0 until the last output.
    :param logprobs: log probabilities of each output token; None if not requested.
    :param prompt_logprobs: those of each prompt token from the second on.
    :param stop_reason: stop string or stop token that ended the answer, in the last output.
    :param outputs: the one answer, by vLLM's names.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    stop_reason: str | int | None = None

    outputs: list[CompletionOutput] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether this is the last output."""
        return self.finish_reason is not None

    @property
    def num_cached_tokens(self) -> int:
        """``cached_tokens``, by vLLM's name."""
        return self.cached_tokens


class AsyncEngine:
    """One or several instances of a model, each in its own process.

    :param model: as for :class:`kvell.LLM`.
    :param beside: further models, in the form of ``model``.
    :param instances: number of instances by role: ``"mixed=2"``, ``"2"`` or ``{"mixed": 2}``.
    :param routing: policy that chooses the instance of a request
        (:data:`kvell.cluster.routing.policies.ROUTINGS`).
    :param limits: bounds of the queue, and of the times of starts, drains and missing heartbeats.
    :param adaptive_roles: whether prefill and decode instances change their roles by load
        (``--adaptive-roles``).
    :param relief: moves between instances while memory is short (``--relief``).
    :param pd_caching: caching policy of prefill and decode instances, 0 to 3
        (:data:`kvell.mempool.rendezvous.PdCaching`).
    :param page_transport: transport of pages between instances.
    :param cache_dir: directory of the converted packaged model; ``~/.cache/kvell`` if None.
    :param progress: reports loading; see :data:`kvell.models.sources.progress.Progress`.
    :param generation_config: source of default sampling: ``auto`` is the models'
        ``generation_config.json``, ``vllm`` is vLLM's neutral defaults.
    :param seed: seed of the requests that have none: the same requests in the same order sample
        with the same seeds.  Random if None.
    :param calibration: file of ``kvell calibrate`` with the prices of the instances.  If None,
        several instances calibrate themselves at their first start.
    :param no_calibration: whether to keep the default prices instead.
    :param settings: further settings of every instance, named as in
        :class:`~kvell.engine.setup.engine_settings.EngineSettings` (``dtype``, …); ``kv_memory``,
        ``memory`` and ``cpu_buffer`` are sizes of each instance, like ``"512MiB"``.
    :raises ChangeSomething: for instances, routing or a model that cannot be served.
    :raises UnknownArgument: for an argument that does not exist.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "smollm2",
        *,
        beside: Sequence[str] = (),
        instances: str | Mapping[str, int] = "mixed=1",
        routing: str = DEFAULT_ROUTING,
        limits: FrontLimits | None = None,
        pd_caching: PdCaching | None = None,
        adaptive_roles: bool = False,
        page_transport: PageTransport = "memory",
        relief: Relief = DEFAULT_RELIEF,
        cache_dir: Path | None = None,
        progress: Progress = quiet,
        generation_config: GenerationConfig = "auto",
        seed: int | None = None,
        calibration: str | PathLike[str] | None = None,
        no_calibration: bool = False,
        **settings: Any,
    ) -> None:
        counts = _counts(instances)
        pool = PoolSettings(pd_caching, page_transport, adaptive_roles, relief).resolve(counts)
        chosen = settings_from(AsyncEngine, model, {"beside": beside, **settings})
        self._texts = texts_of(
            (chosen.model, *chosen.beside),
            cache_dir or Path.home() / ".cache" / "kvell",
            progress,
            TextOptions(generation_config=generation_config),
            hf_overrides=chosen.overrides_json,
            tokenizer=chosen.tokenizer,
        )
        file = None if calibration is None else Path(calibration)
        command = instance_command(chosen, PriceSettings(file, no_calibration))
        self._front = Front(
            command, instances=counts, routing=routing, limits=limits, pool=pool, seed=seed
        )
        self._models: dict[str, TextModel] = {}
        self._work = TextWork()
        self._encoders: dict[str, TextEncoder] = {}
        self._starts_itself: asyncio.Lock | None = None
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: object) -> Self:
        """Return an engine that starts with its first request.

        :raises ChangeSomething: as the class itself.
        """
        check_others("AsyncEngine.from_engine_args", others, (), ENGINE_OTHERS)
        engine = cls(**vars(engine_args))
        engine._starts_itself = asyncio.Lock()
        return engine

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Load tokenizers, start the instances and wait until all are ready.

        :raises InstanceStartError: when one does not become ready.
        """
        first, *others = self._texts.load().models
        self._models = {"": first, **{other.name: other for other in others}}
        await self._front.start()
        facts = self._front.facts
        self._encoders = {
            name: TextEncoder(model, facts.lengths(name).longest_tokens, self._work)
            for name, model in self._models.items()
        }

    def shutdown(self) -> Awaitable[None]:
        """Let running requests end within the drain time of the limits, then end the instances.

        In a running loop this begins when it is called, as in vLLM; the returned object can be
        awaited.  Outside of one the returned object must be run.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._shut_down()
        if self._ending is None:
            self._ending = loop.create_task(self._shut_down())
        return self._ending

    async def _shut_down(self) -> None:
        await self._front.close()
        self._work.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        session: str = "",
        cache_salt: str = "",
        priority: int = 0,
        **others: object,
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Yield an output after each new piece; the last has the finish reason.

        Outputs have the answer so far, unless ``sampling.output_kind`` says otherwise.

        Closing the generator early cancels the request.  Only the first of ``n`` answers is
        generated.

        :param sampling: the model's defaults if None.
        :param sampling_params: vLLM's name of ``sampling``.
        :param priority: requests with lower numbers run first.
        :param others: further arguments of vLLM, whose values must ask for what Kvell does anyway.
        :param request_id: id for :meth:`abort`; random if None.
        :param cache_salt: only requests with the same salt share cached prefixes.
        :param session: key of requests that share prefixes; by default the beginning of the prompt.
        :raises ChangeSomething: for a prompt or parameters that can never be served.
        :raises TryLater: when there is no room or no instance now.
        :raises RequestFailed: when the instances that computed it died.
        """
        names = ("prompt", "sampling_params", "request_id", "priority", "session", "cache_salt")
        check_others("AsyncEngine.generate", others, names, CALL_OTHERS)
        given = chosen_sampling(sampling, sampling_params)
        name, ids = await self._encoded(prompt)
        served = self._models[name]
        [params] = one_each(given, [limit_answer(served.sampling_defaults)])
        params = await self._encoders[name].with_bad_words(params.choices()[0])
        known_id = request_id or uuid.uuid4().hex
        spec = _spec(known_id, ids, params, cache_salt, name, session, priority=priority)
        kind = params.output_kind
        whole = WholeAnswer()
        total = 0.0
        all_likely = list[dict[int, Logprob]]()
        output = partial(_output, known_id, ids.tolist(), params=params)
        async with aclosing(text_deltas(self._front, served, spec)) as deltas:
            async for _, delta in deltas:
                likely = list[dict[int, Logprob]]()
                if params.logprobs is not None:
                    likely = logprobs_by_token(delta.token_ids, delta.logprobs, served.token_text)
                    total += sum(entry.logprob for entry in delta.logprobs)
                if kind is RequestOutputKind.DELTA:
                    yield output(delta, likely=likely, total=total)
                    continue
                whole.push(delta)
                all_likely += likely
                if kind is RequestOutputKind.CUMULATIVE or delta.finish_reason is not None:
                    yield output(whole.delta(), likely=list(all_likely), total=total)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        model: str = "",
        session: str = "",
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Answer a conversation; see :meth:`generate`.

        :param messages: ``{"role": …, "content": …}`` in order.
        :param model: name of one of several models; "" is the first.
        :raises ChangeSomething: if the model has no chat template.
        """
        given = chosen_sampling(sampling, sampling_params)
        await self._started()
        served = self._models[self._known(model)]
        ids = await self._encoders[self._known(model)].encode_conversation(
            lambda: served.rendered_chat(messages), chars=chars_within(messages)
        )
        key = session or conversation_key(messages)
        prompt = {"prompt_token_ids": ids, "model": model}
        async with aclosing(self.generate(prompt, given, request_id, session=key)) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        session: str = "",
        cache_salt: str = "",
    ) -> EmbeddingOutput:
        """Return a prompt's vector; see :meth:`kvell.LLM.embed`.

        Cancelling the call cancels the request.

        :raises ChangeSomething: for a prompt or a model that has no embeddings.
        :raises TryLater: when there is no room or no instance now.
        :raises RequestFailed: when the instances that computed it died, or it was aborted.
        """
        name, ids = await self._encoded(prompt)
        served = self._models[name]
        served.embeddings.require_served(served.name)
        known_id = request_id or uuid.uuid4().hex
        spec = _spec(known_id, ids, POOLED, cache_salt, name, session, "last")
        return embedding_output(ids, await embed(self._front, spec), known_id)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **others: object,
    ) -> AsyncGenerator[EmbeddingOutput, None]:
        """Yield a prompt's vector; see :meth:`embed`."""
        names = ("prompt", "pooling_params", "request_id")
        check_others("AsyncEngine.encode", others, names, CALL_OTHERS)
        yield await self.embed(prompt, request_id)

    def reset_prefix_cache(self) -> None:
        """Evict the cached prefixes of every instance; pages that requests use stay."""
        self._front.forget_prefixes()

    def abort(self, request_id: str) -> None:
        """End a request, with the finish reason ``stop``.  Unknown ids are ignored."""
        self._front.stop(request_id)

    def scale(self, instances: str | Mapping[str, int]) -> None:
        """Start to add or drain instances until each named role has its number.

        :param instances: as at the start, like ``"mixed=3"``; other roles stay unchanged.
        :raises ChangeSomething: when the machine has no memory for more.
        """
        self._front.scale(_counts(instances))

    def drain(self, instance_id: str) -> None:
        """Take an instance out of service; its requests end there or continue on other instances.

        :raises ChangeSomething: when no instance has this id, or it is the last that serves.
        """
        self._front.drain(instance_id)

    def instances(self) -> list[MemberStatus]:
        """Return the state of every instance."""
        return [status for status, _ in self._front.instances()]

    async def stats(self, *, with_audit: bool = False) -> dict[str, Stats]:
        """Return the counters of every serving instance, by id.

        :param with_audit: whether each instance also recounts its pages (``Stats.problems``).
        """
        return await self._front.stats(with_audit=with_audit)

    async def _encoded(self, prompt: Prompt) -> tuple[str, NDArray[np.int32]]:
        """Return the name of a prompt's model, "" for the first, and its token ids."""
        await self._started()
        given = given_prompt(prompt)
        name = self._known(given.model)
        if given.token_ids is not None:
            return name, given.token_ids
        return name, await self._encoders[name].encode("prompt", given.text or "")

    async def _started(self) -> None:
        """Start the engine at its first request, if :meth:`from_engine_args` made it."""
        if self._starts_itself is not None and not self._models:
            async with self._starts_itself:
                if not self._models:
                    await self.start()

    def _known(self, model: str) -> str:
        """Return the name of a model on instances: "" for the first.

        :raises ChangeSomething: if the model is not served.
        """
        if not self._models:
            remedy = "use `async with engine`, or await start()"
            raise ChangeSomething("AsyncEngine", model or "", "is not started", remedy)
        if model == self._models[""].name:
            return ""
        if model not in self._models:
            names = ", ".join(served.name for served in self._models.values())
            raise ChangeSomething("model", model, "is not served", f"use one of {names}")
        return model


def _spec(
    request_id: str,
    token_ids: NDArray[np.int32],
    sampling: SamplingParams,
    cache_salt: str,
    model: str,
    session: str,
    pooling: Pooling = "",
    priority: int = 0,
) -> RequestSpec:
    """Return a request; without a session, prompts that begin alike have one."""
    return RequestSpec(
        RequestId(request_id),
        to_token_bytes(token_ids),
        sampling,
        cache_salt=cache_salt,
        model=model,
        session=session or prompt_key(token_ids),
        pooling=pooling,
        priority=priority,
    )


def _output(
    request_id: str,
    prompt: list[int],
    piece: TextDelta,
    params: SamplingParams,
    likely: list[dict[int, Logprob]],
    total: float,
) -> StreamedOutput:
    """Return a piece of an answer, or the answer so far, as an output.

    :param likely: the chosen and the likeliest tokens of each of its positions.
    :param total: sum of the logprobs of all tokens so far.
    """
    has_logprobs = params.logprobs is not None
    answer = CompletionOutput(
        0,
        piece.text,
        list(piece.token_ids),
        total if has_logprobs else None,
        likely if has_logprobs else None,
        piece.finish_reason,
        piece.stop_reason,
    )
    return StreamedOutput(
        request_id,
        prompt,
        answer.token_ids,
        answer.text,
        piece.finish_reason,
        piece.usage.cached_tokens,
        list(piece.logprobs) if has_logprobs else None,
        None if params.prompt_logprobs is None else list(piece.prompt_logprobs),
        piece.stop_reason,
        [answer],
    )


def _counts(instances: str | Mapping[str, int]) -> dict[str, int]:
    counts = parse_instances(instances) if isinstance(instances, str) else checked_counts(instances)
    check_start(counts, "instances")
    return counts
