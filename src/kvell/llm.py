"""``kvell.LLM``: a model in this process, with vLLM's call signatures.

It uses the instance protocol with its engine over queues, as a front does over a socket.  The
engine runs in its own thread (:mod:`kvell.serving.readers`), so calls from several threads,
interleaved streams, and Ctrl-C in the middle of a call are safe.
"""

import inspect
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch

from kvell.clock import Clock, MonotonicClock
from kvell.engine.core.journal import Journal
from kvell.engine.engine import Engine
from kvell.engine.opened import Pricing, open_served
from kvell.engine.protocol.messages import ResetPrefixCache
from kvell.engine.protocol.pooling import (
    EmbeddingOutput,
    PoolingParams,
    ScoringOutput,
    similarities,
)
from kvell.engine.protocol.sampling_params import SamplingParams, SeedSource
from kvell.engine.requests.beam_search import BeamSearchParams
from kvell.engine.sampling.model_defaults import GenerationConfig
from kvell.engine.setup.arguments.settings_from import settings_from
from kvell.engine.setup.contract import MemoryContract
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.equivalents.arguments import CALL_OTHERS
from kvell.equivalents.other import check_others
from kvell.errors import ChangeSomething
from kvell.local.engine import LocalEngine
from kvell.local.jobs import (
    BeamSearchOutput,
    Sampling,
    chosen_sampling,
    measure,
    output_of,
    several,
)
from kvell.local.metrics import Metric, metrics_of
from kvell.local.outputs import RequestOutput
from kvell.local.requests import LocalRequests, Priority
from kvell.local.runs import JobRunner, UseTqdm, progress_bar
from kvell.models.sources.progress import Progress, quiet
from kvell.models.text.chat_template import NO_FIELDS, ContentFormat, Message, chosen_template
from kvell.models.text.tokenizer import Tokenizer

__all__ = ["LLM", "Prompt", "RequestOutput"]

Prompt = str | Mapping[str, Any] | Sequence[int] | npt.NDArray[np.integer[Any]]
"""A text, ``{"prompt": …}`` or ``{"prompt_token_ids": […]}``, or token ids (integers [tokens]).

A mapping may also have ``images``: the tensors of the prompt's images that the model's processor
returns together with the token ids (``{"pixel_values": …, …}``).  It may have ``model``, the name
of one of several models.
"""


class LLM:
    """A model, its engine and its tokenizer in this process.

    :param model: ``smollm2``, a transformers directory, a GGUF file, or a hub id; requests use
        the same name, or NAME of ``NAME=…``.  Or an object with all settings.
    :param cache_dir: directory of the converted packaged model; ``~/.cache/kvell`` if None.
    :param progress: reports loading; see :data:`kvell.models.sources.progress.Progress`.
    :param journal: recorder of all inputs of the engine, if given.
    :param incarnation: number of this start of a served instance.
    :param weights_fd: memfd of the models' weights, which processes of this host share; it must
        stay open while they load.  Not used on a GPU.
    :param clock: clock for the seconds of :meth:`stats`; the monotonic clock if None.
    :param generation_config: source of default sampling: ``auto`` is the models'
        ``generation_config.json``, ``vllm`` is vLLM's neutral defaults.
    :param seed: seed of the requests that have none: the same calls in the same order sample with
        the same seeds.  Random if None.
    :param pricing: returns the prices that a served instance reports; the defaults if None.
    :param reads_text: load the tokenizer in a thread, beside the weights; a served instance does
        not need it.
    :param settings: further settings, named as in
        :class:`~kvell.engine.setup.engine_settings.EngineSettings` (``dtype``, ``max_model_len``,
        …); ``kv_memory``, ``memory``, ``cpu_buffer`` and ``weight_cache_size`` are sizes like
        ``"512MiB"``.
    :raises ChangeSomething: with the argument that is invalid.
    :raises UnknownArgument: for an argument that does not exist.
    """

    def __init__(
        self,
        model: str | PathLike[str] | EngineSettings,
        *,
        cache_dir: Path | None = None,
        progress: Progress = quiet,
        journal: Journal | None = None,
        incarnation: int = 0,
        weights_fd: int | None = None,
        clock: Clock | None = None,
        generation_config: GenerationConfig = "auto",
        seed: int | None = None,
        pricing: Pricing | None = None,
        reads_text: bool = True,
        **settings: Any,
    ) -> None:
        chosen = settings_from(LLM, model, settings)
        seeds = SeedSource(seed)
        folder = cache_dir or Path.home() / ".cache" / "kvell"
        opened = open_served(chosen, folder, progress, weights_fd, reads_text=reads_text)
        self._first = opened.main
        engine = opened.engine(chosen, journal, incarnation, pricing)
        # OpenMP's number of threads is per thread: steps use the caller's number.
        threads = partial(torch.set_num_threads, torch.get_num_threads())
        self._local = LocalEngine(engine, threads)
        self._clock = clock or MonotonicClock()
        self._runner = JobRunner(engine.failed_steps, self._clock)
        self.requests = LocalRequests(
            self._local,
            self._runner,
            opened.main,
            {entry.name: entry for entry in opened.named},
            seeds,
            generation_config,
        )
        self._stats: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and free its memory; requests in progress and later calls fail."""
        self._local.close()

    @property
    def engine(self) -> Engine:
        """The engine.

        :raises RuntimeError: after :meth:`close`.
        """
        return self._local.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the first model."""
        return self._first.tokenizer

    @property
    def contract(self) -> MemoryContract:
        """The memory contract, which accounts for every byte; ``lines()`` returns it as text."""
        return self.engine.contract

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        sequential: bool = False,
        *,
        sampling_params: Sampling = None,
        use_tqdm: UseTqdm = False,
        priority: Priority = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Complete every prompt; return outputs in the order of the prompts.

        A request whose logits are not numbers has an ``error``; other requests continue.  Calls
        from several threads run concurrently.

        :param prompts: one prompt or several; a list of integers is one prompt of token ids
            only inside another list.
        :param sampling: parameters of all prompts, or a list with those of each; those of
            :meth:`get_default_sampling_params` if None.
        :param sequential: whether to run one request after the other instead of all together.
        :param sampling_params: vLLM's name of ``sampling``.
        :param use_tqdm: whether to show a bar of ended requests; or a function like ``tqdm``.
        :param priority: of all prompts, or of each; requests with lower numbers run first.
        :param others: further arguments of vLLM (``lora_request``, …), whose values must ask for
            what Kvell does anyway.
        :raises ChangeSomething: if a prompt can never be served; then no request is run.
        :raises UnknownArgument: for an argument that does not exist.
        :raises Exception: the error of a step that computed a request; all requests end then.
        """
        check_others("LLM.generate", others, _arguments(LLM.generate), CALL_OTHERS)
        params = chosen_sampling(sampling, sampling_params)
        with self._local.shared.reader() as reader:
            jobs = self.requests.answer_jobs(reader, prompts, params, priority)
            all_jobs = [job for several in jobs for job in several]
            started_seconds = self._clock.now_seconds()
            self.engine.core.max_running = 0
            with progress_bar(use_tqdm, len(all_jobs)) as ended:
                for batch in [[job] for job in all_jobs] if sequential else [all_jobs]:
                    self._runner.run(reader, batch, ended)
        seconds = self._clock.now_seconds() - started_seconds
        self._stats = measure(all_jobs, seconds, self.engine.core.max_running)
        return [output_of(several) for several in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling = None,
        model: str = "",
        *,
        sampling_params: Sampling = None,
        use_tqdm: UseTqdm = False,
        tools: Sequence[Message] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: Priority = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several; like :meth:`generate` otherwise.

        :param messages: ``{"role": …, "content": …}`` in order, or a list of such conversations;
            content is a text or a list of parts.
        :param model: name of one of several models; "" is the first.
        :param tools: functions that the answer may call, in OpenAI's form.
        :param chat_template: file or text of a template; the model's own if None.
        :param chat_template_content_format: form of content for the template: ``string``,
            ``openai`` (parts), or ``auto`` for the form that it reads.
        :param chat_template_kwargs: further variables of the template.
        :param add_generation_prompt: whether the prompt ends with the template's generation prompt.
        :param continue_final_message: whether the answer continues the last message instead.
        :raises ChangeSomething: if the model has no chat template, the given one is invalid, or a
            prompt can never be served.
        """
        check_others("LLM.chat", others, _arguments(LLM.chat), CALL_OTHERS)
        if add_generation_prompt and continue_final_message:
            problem, remedy = "conflicts with add_generation_prompt", "set that to False"
            raise ChangeSomething("continue_final_message", True, problem, remedy)
        many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self.requests.tokenizer(model)
        chosen = chosen_template(chat_template, chat_template_content_format)
        fields = chat_template_kwargs or NO_FIELDS
        template = tokenizer.choose_template(chosen)
        render = partial(tokenizer.rendered_chat, tools=tools, fields=fields, template=template)
        opens, continues = add_generation_prompt, continue_final_message
        texts = [render(chat, opens_answer=opens, continues_last=continues) for chat in many]
        prompts: list[Prompt] = [
            {
                "prompt": text,
                "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False),
                "model": model,
            }
            for text in texts
        ]
        params = chosen_sampling(sampling, sampling_params)
        return self.generate(prompts, params, use_tqdm=use_tqdm, priority=priority)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "last",
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = False,
        priority: Priority = None,
        **others: object,
    ) -> list[EmbeddingOutput]:
        """Return the vector of every prompt, in the order of the prompts.

        A vector is the final norm's output at the last token, scaled to length one.

        :param prompts: as for :meth:`generate`, without images.
        :param pooling: ``last``; other values are refused.
        :param pooling_params: parameters of vLLM, which were checked when they were made.
        :raises ChangeSomething: if a prompt or a model has no embeddings; then no request is run.
        :raises RequestFailed: once all have ended, if a vector is not numbers.
        """
        check_others("LLM.embed", others, _arguments(LLM.embed), CALL_OTHERS)
        return self._embedded(prompts, use_tqdm, pooling, priority)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: UseTqdm = False,
        **others: object,
    ) -> list[EmbeddingOutput]:
        """Return the vector of every prompt, like :meth:`embed`; ``outputs.data`` is its array.

        :param pooling_task: ``embed``, the only one; None means the same.
        :raises ChangeSomething: for another task.
        """
        check_others("LLM.encode", others, _arguments(LLM.encode), CALL_OTHERS)
        PoolingParams(task=pooling_task)
        return self.embed(prompts, pooling_params=pooling_params, use_tqdm=use_tqdm)

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = False,
        **others: object,
    ) -> list[ScoringOutput]:
        """Return the similarity of each pair of texts: the cosine of their vectors.

        :param data_1: one text for all of ``data_2``, or as many.
        :raises ChangeSomething: if their numbers differ, or a text or the model has no embeddings.
        """
        check_others("LLM.score", others, _arguments(LLM.score), CALL_OTHERS)
        ones, two = several(data_1), several(data_2)
        if len(ones) not in (1, len(two)):
            problem = f"does not match the {len(two)} texts of data_2"
            remedy = "give one text, or one for each"
            raise ChangeSomething("data_1", f"{len(ones)} texts", problem, remedy)
        vectors = self._embedded([*ones, *two], use_tqdm)
        firsts = vectors[: len(ones)] * (len(two) if len(ones) == 1 else 1)
        seconds = vectors[len(ones) :]
        scores = similarities([each.data for each in firsts], [each.data for each in seconds])
        return [
            ScoringOutput(score, left.prompt_token_ids + right.prompt_token_ids, str(i))
            for i, (score, left, right) in enumerate(zip(scores, firsts, seconds, strict=True))
        ]

    def classify(self, prompts: Prompt | Sequence[Prompt], **others: object) -> NoReturn:
        """Refuse: no served model has a head that classifies.

        :raises ChangeSomething: naming the model.
        """
        check_others("LLM.classify", others, ("use_tqdm", "pooling_params"), CALL_OTHERS)
        several(prompts)
        problem = "has no classification head that Kvell serves"
        remedy = "use score with a text for each class, or generate with structured_outputs.choice"
        raise ChangeSomething("model", self._local.name, problem, remedy)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
        **others: object,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest answers to every prompt, in the order of the prompts.

        Beams share the pages of their common prefixes.

        :param prompts: as for :meth:`generate`, without images.
        :raises ChangeSomething: if a prompt can never be served; then no request is run.
        :raises RequestFailed: if the model's logits are not numbers.
        """
        check_others("LLM.beam_search", others, _arguments(LLM.beam_search), CALL_OTHERS)
        jobs = [self.requests.beam_job(prompt, params) for prompt in several(prompts)]
        with (
            self._local.shared.reader() as reader,
            progress_bar(use_tqdm, len(jobs)) as ended,
        ):
            while step := [request for job in jobs for request in job.requests()]:
                self._runner.run(reader, step)
            for _ in jobs:
                ended()
        return [job.output() for job in jobs]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> Generator[str, None, str]:
        """Yield one request's text as it is generated; closing the iterator cancels the request.

        Only the first of ``n`` answers is generated.  The generator returns the reason of its end:
        ``stop``, or ``length`` at the limit of tokens.

        :raises ChangeSomething: if the prompt can never be served.
        :raises RequestFailed: if the model's logits are not numbers.
        """
        with self._local.shared.reader() as reader:
            [[job, *_]] = self.requests.answer_jobs(reader, [prompt], sampling)
            return (yield from self._runner.stream(reader, job))

    def get_tokenizer(self) -> Any:
        """Return the first model's tokenizer of transformers.

        :raises ChangeSomething: if the model has none.
        """
        if not self.tokenizer.knows_text:
            remedy = "give prompts as token ids, or add a tokenizer to the model's directory"
            raise ChangeSomething("model", self._first.path, "holds no tokenizer", remedy)
        return self.tokenizer.backend

    def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes; return whether no request was in progress.

        Pages that requests in progress use stay, and others may hit them.
        """
        return self._local.shared.call(self._reset_prefix_cache)

    def _reset_prefix_cache(self) -> bool:
        self.engine.handle(ResetPrefixCache())
        return not self.engine.has_requests()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the first model's default sampling parameters.

        They are those of its ``generation_config.json``, unless ``generation_config="vllm"``.
        """
        return self.requests.sampling_defaults("")

    def stats(self) -> dict[str, Any]:
        """Return figures of the last :meth:`generate`, from submission to the last token."""
        return dict(self._stats)

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters and gauges since the start, by the server's names."""
        return metrics_of(self._local.shared.call(self.engine.core.stats))

    def _embedded(
        self,
        prompts: object,
        use_tqdm: UseTqdm,
        pooling: str = "last",
        priority: Priority = None,
    ) -> list[EmbeddingOutput]:
        jobs = self.requests.embedding_jobs(prompts, pooling, priority)
        with (
            self._local.shared.reader() as reader,
            progress_bar(use_tqdm, len(jobs)) as ended,
        ):
            self._runner.run(reader, jobs, ended)
        return [job.output() for job in jobs]


def _arguments(method: Callable[..., object]) -> Collection[str]:
    return inspect.signature(method).parameters.keys() - {"self", "others"}
