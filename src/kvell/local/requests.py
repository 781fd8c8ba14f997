"""Requests of ``kvell.LLM``: checks of prompts and parameters, and their jobs."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.given import GivenPrompt, given_prompt, whole
from kvell.engine.protocol.pooling import POOLED
from kvell.engine.protocol.sampling_params import SamplingParams, SeedSource
from kvell.engine.requests.admissible import pooling_problem, served_pooling
from kvell.engine.requests.beam_search import BeamSearch, BeamSearchParams
from kvell.engine.sampling.model_defaults import GenerationConfig, limit_answer, sampling_defaults
from kvell.errors import ChangeSomething
from kvell.local.engine import LocalEngine
from kvell.local.jobs import (
    AnswerJob,
    BeamJob,
    EmbeddingJob,
    Sampling,
    one_each,
    several,
    with_bad_words,
)
from kvell.local.runs import JobRunner
from kvell.models.images.image_content import ImagePrompt
from kvell.models.loading.named_models import NamedModel
from kvell.models.text.tokenizer import Tokenizer
from kvell.serving.readers import EventReader

Priority = Sequence[int] | int | None
"""The priority of all prompts, or a list with those of each; lower numbers run first."""


class LocalRequests:
    """The requests of one ``LLM``, which it makes and numbers."""

    def __init__(
        self,
        local: LocalEngine,
        runner: JobRunner,
        first: NamedModel,
        opened: Mapping[str, NamedModel],
        seeds: SeedSource,
        generation_config: GenerationConfig,
    ) -> None:
        self.local, self.runner, self._seeds = local, runner, seeds
        self._first, self._opened = first, opened
        self._generation_config = generation_config

    def answer_jobs(
        self,
        reader: EventReader,
        prompts: object,
        sampling: Sampling,
        priority: Priority = None,
        name: str = "",
    ) -> list[list[AnswerJob]]:
        """Return the jobs of each prompt, one for each of its answers.

        :param reader: releases the prompts' images when it is closed.
        :param name: id of the request in its outputs; the index of its prompt if "".
        :raises ChangeSomething: if a prompt can never be served.
        """
        given = [given_prompt(prompt, "images") for prompt in several(prompts)]
        models = [self.known(prompt.model) for prompt in given]
        each = one_each(sampling, [self.sampling_defaults(model) for model in models])
        params = [
            with_bad_words(prompt_params, self.tokenizer(model))
            for prompt_params, model in zip(each, models, strict=True)
        ]
        priorities = _priorities(priority, len(given))
        ids = [self._token_ids(prompt) for prompt in given]
        images = [self.local.with_images(reader, *pair) for pair in zip(ids, given, strict=True)]
        for prompt, prompt_params, model in zip(images, params, models, strict=True):
            self.local.check(prompt, prompt_params, model, self.tokenizer(model))
        return [
            [
                AnswerJob(
                    i,
                    self.runner.spec(images[i], own, models[i], priority=priorities[i]),
                    ids[i],
                    self.tokenizer(models[i]),
                    choice,
                    given[i].text,
                    name=name,
                )
                for choice, own in enumerate(map(self._seeds.with_seed, prompt_params.choices()))
            ]
            for i, prompt_params in enumerate(params)
        ]

    def embedding_jobs(
        self, prompts: object, pooling: str, priority: Priority = None, name: str = ""
    ) -> list[EmbeddingJob]:
        """Return a job for each prompt's vector.

        :raises ChangeSomething: if a prompt or its model has no embeddings.
        """
        kind = served_pooling(pooling)
        many = several(prompts)
        priorities = _priorities(priority, len(many))
        jobs = []
        for i, prompt in enumerate(many):
            given = given_prompt(prompt, "images")
            model = self.known(given.model)
            ids = self._token_ids(given)
            self.model(model).embeddings.require_served(model or self.local.name)
            limits = self.local.engine.core.entrance.rules(model).limits
            if problem := pooling_problem(ids, limits, has_images=bool(given.images)):
                raise problem
            spec = self.runner.spec(ImagePrompt(ids, ()), POOLED, model, kind, priorities[i])
            jobs.append(EmbeddingJob(spec, name or str(i)))
        return jobs

    def beam_job(self, prompt: object, params: BeamSearchParams) -> BeamJob:
        given = given_prompt(prompt, "images")
        model = self.known(given.model)
        ids = self._token_ids(given)
        if given.images:
            problem = "cannot be combined with beam search"
            raise ChangeSomething("images", "…", problem, "leave them out")
        plain = SamplingParams(max_tokens=params.max_tokens)
        tokenizer = self.tokenizer(model)
        self.local.check(ImagePrompt(ids, ()), plain, model, tokenizer)
        search = BeamSearch.of(params, self.local.engine.core.entrance.rules(model).eos_token_ids)
        return BeamJob(ids, search, tokenizer, model, self.runner.spec)

    def known(self, model: str) -> str:
        return "" if model == self.local.name else model

    def tokenizer(self, model: str) -> Tokenizer:
        return self.model(model).tokenizer

    def model(self, model: str) -> NamedModel:
        """Return a model; "" is the first.

        :raises ChangeSomething: if no model has the name.
        """
        rules = self.local.engine.core.entrance.rules
        return self._opened[rules(model).name] if model else self._first

    def sampling_defaults(self, model: str) -> SamplingParams:
        """Return a model's default sampling, with vLLM's limit of tokens if it has none."""
        return limit_answer(sampling_defaults(self.model(model).path, self._generation_config))

    def _token_ids(self, prompt: GivenPrompt) -> npt.NDArray[np.int32]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        return self.tokenizer(self.known(prompt.model)).encode(prompt.text or "")


def _priorities(priority: Priority, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    many = list(priority) if isinstance(priority, list | tuple) else [priority] * count
    if len(many) != count:
        value, problem = f"{len(many)} numbers", f"does not match {count} prompts"
        raise ChangeSomething("priority", value, problem, "give one each")
    return [whole("priority", number) for number in many]
