"""Conversion of commands to requests; a command that can never be served is refused."""

import hashlib
from collections.abc import Container, Mapping
from dataclasses import replace

import numpy as np
from msgspec import structs

from kvell.engine.lending.distributed_request import local_reason
from kvell.engine.moving.encoding import ArrivedRequest
from kvell.engine.protocol.messages import Finished, Submit, refusal
from kvell.engine.protocol.pooling import POOLED
from kvell.engine.protocol.request_spec import RequestSpec, to_token_ids
from kvell.engine.protocol.sampling_params import SEED_BYTES
from kvell.engine.protocol.statistics import ModelLengths
from kvell.engine.requests.admissible import (
    output_problem,
    pooling_problem,
    request_problem,
    sampling_problem,
)
from kvell.engine.requests.cache_roots import cache_root, long_root
from kvell.engine.requests.limits import Limits, ModelRules
from kvell.engine.requests.request import Request
from kvell.errors import ChangeSomething
from kvell.memory import Tokens
from kvell.vocabulary import RequestId


class RequestFactory:
    """The factory of one engine core's requests, which it numbers.

    :param rules: by the model's name; commands that name no model mean the first.
    :param is_cached: whether prefixes are cached on the instance that computes them.
    """

    def __init__(self, rules: Mapping[str, ModelRules], *, is_cached: bool) -> None:
        self._rules, self._is_cached = rules, is_cached
        self._first = next(iter(rules))
        self._num_made = 0

    def rules(self, model: str = "") -> ModelRules:
        """Return the rules of a model; "" is the first.

        :raises ChangeSomething: if no model has that name.
        """
        rules = self._rules.get(model or self._first)
        if rules is None:
            served = ", ".join(filter(None, self._rules))
            remedy = f"use {served}" if served else "leave it out: there is one model"
            raise ChangeSomething("model", model[:200], "is not served", remedy)
        return rules

    def lengths(self, *, borrows: bool) -> tuple[ModelLengths, dict[str, ModelLengths]]:
        """Return the longest requests to the first model, and to further models by name."""
        first, *others = ((n, r.lengths(borrows=borrows)) for n, r in self._rules.items())
        return first[1], dict(others)

    def make(self, command: Submit, in_use: Container[RequestId]) -> Request | Finished:
        """Make the request of a command, or its end if it can never be served."""
        return self._made(command, to_token_ids(command.output), in_use)

    def make_arrived(
        self, arrived: ArrivedRequest, in_use: Container[RequestId]
    ) -> Request | Finished:
        """Make a request that arrived with its pages, or its end if it cannot continue here."""
        before = to_token_ids(arrived.command.output)
        output = np.append(before, np.asarray(arrived.handover.output, np.int32))
        request = self._made(arrived.command, output, in_use)
        if isinstance(request, Finished):
            return request
        request.handle, request.cached_tokens = arrived.handle, arrived.handover.cached_tokens
        request.computed = request.settled = arrived.computed
        request.entered_output = len(output)
        request.preemptions = arrived.handover.preemptions
        request.cache_root, request.returns_to = arrived.handover.root, arrived.handover.returns_to
        return request

    def _made(
        self, command: Submit, output: Tokens, in_use: Container[RequestId]
    ) -> Request | Finished:
        if problem := self._problem(command, output, in_use):
            return refusal(command, problem)
        rules = self.rules(command.spec.model)
        room = _limits(command, rules).max_model_len - command.spec.prompt_tokens
        spec = _resolved(command.spec, rules.name)
        sampling = spec.sampling
        number, self._num_made = self._num_made, self._num_made + 1
        max_tokens = max(1, min(sampling.max_tokens or room, room))
        root = cache_root(
            spec.cache_salt,
            f"{number} {command.request_id}",
            is_scored=sampling.prompt_logprobs is not None,
            is_cached=self._is_cached and rules.limits.enable_prefix_caching,
        )
        short_tokens = rules.limits.short_rope_tokens
        return Request(
            spec,
            command.attempt,
            max_tokens,
            long_root(root) if 0 < short_tokens < spec.prompt_tokens + len(output) else root,
            short_rope_tokens=short_tokens,
            output=output.tolist(),
            number=number,
            suspect_at=len(output) if command.is_suspect else -1,
        )

    def _problem(
        self, command: Submit, output: Tokens, in_use: Container[RequestId]
    ) -> ChangeSomething | None:
        spec = command.spec
        prompt = spec.token_ids
        if command.request_id in in_use:
            return ChangeSomething("request_id", command.request_id, "is in use", "choose another")
        try:
            rules = self.rules(spec.model)
        except ChangeSomething as problem:
            return problem
        if spec.images and not rules.takes_images:
            why = "are given to a model that takes only text"
            remedy = "leave them out, or name a model that takes them"
            return ChangeSomething("images", f"{len(spec.images)} images", why, remedy)
        limits = _limits(command, rules)
        reason = local_reason(rules.name, rules.layout.groups)
        if len(prompt) + len(output) <= limits.short_rope_tokens:
            reason = (
                reason or f"its rotary frequencies change beyond {limits.short_rope_tokens} tokens"
            )
        tokens = len(prompt) + (spec.sampling.max_tokens or 1)
        if command.placement and reason and tokens > rules.limits.max_model_len:
            remedy = f"send at most {rules.limits.max_model_len} tokens, the answer included"
            return ChangeSomething(
                "prompt", f"{len(prompt)} tokens", f"cannot leave this instance: {reason}", remedy
            )
        if spec.pooling:
            return pooling_problem(prompt, limits, has_images=bool(spec.images))
        if headless := rules.head_problem(spec.model or "this model"):
            return headless
        max_tokens = spec.sampling.max_tokens or 1
        return (
            sampling_problem(spec.sampling, limits, bool(spec.images))
            or request_problem(prompt, spec.images, max_tokens, limits, rules.layout)
            or output_problem(output, limits)
        )


def _limits(command: Submit, rules: ModelRules) -> Limits:
    """Return the limits of a request; a placement allows requests as long as it has room for."""
    limits = rules.limits
    if not command.placement:
        return limits
    placed = sum(entry.num_blocks for entry in command.placement) * limits.section_tokens
    max_tokens = max(limits.max_model_len, min(placed, limits.reach_tokens))
    return replace(limits, max_model_len=max_tokens)


def _resolved(spec: RequestSpec, model: str) -> RequestSpec:
    sampling = POOLED if spec.pooling else spec.sampling
    if not spec.pooling and sampling.seed is None and sampling.temperature != 0:
        digest = hashlib.blake2b(spec.request_id.encode(), digest_size=SEED_BYTES).digest()
        sampling = sampling.reseeded(int.from_bytes(digest, "little"))
    if sampling is spec.sampling and model == spec.model:
        return spec
    return structs.replace(spec, sampling=sampling, model=model)
