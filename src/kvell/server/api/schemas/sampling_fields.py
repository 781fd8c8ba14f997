"""Fields that several bodies share: those of scheduling, and those of sampling."""

from array import array
from typing import Annotated

import numpy as np
from pydantic import Field, StrictBool, ValidatorFunctionWrapHandler, WrapValidator

from kvell.engine.protocol.sampling_params import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_BIASES
from kvell.server.api.schemas.formats import StructuredField
from kvell.server.api.schemas.kv_hints import KvHints
from kvell.server.api.schemas.request_body import RequestBody, RequestPart

MAX_INT32 = 2**31 - 1
MAX_STOP_CHARS = 1024
MAX_DEADLINE_SECONDS = 86_400.0

MAX_TOKENS = 1 << 20
"""The most token ids of a list."""


def _checked_ids(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Return a list of token ids as it is if it is valid; one look at a million takes 15 ms."""
    if isinstance(value, list) and len(value) <= MAX_TOKENS:
        try:
            ids = np.frombuffer(array("i", value), np.int32)
        except (TypeError, OverflowError):
            return check(value)
        if not len(ids) or ids.min() >= 0:
            return value
    return check(value)


TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[
    list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True), WrapValidator(_checked_ids)
]
"""A list that may be long.  Its validation ends at the first invalid element: a million errors
would take a minute."""
BadWords = Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
AllowedTokens = Annotated[
    list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)
]
StopTokens = Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)]
Count = Annotated[int, Field(ge=-1, le=MAX_INT32)]
RepetitionPenalty = Annotated[float, Field(ge=1e-6)]
"""A divisor of logits; a smaller one would make logits infinite."""
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=128, fail_fast=True)]
Biases = Annotated[dict[str, float], Field(max_length=MAX_BIASES)]
DeadlineSeconds = Annotated[float, Field(gt=0, le=MAX_DEADLINE_SECONDS)]


class ScheduledRequest(RequestBody):
    """The fields of caching and scheduling."""

    cache_salt: str | None = Field(default=None, max_length=1024)
    """Only requests with the same salt share cached prefixes."""
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    """Requests with the same key go to one instance, with ``--routing session``."""
    priority: Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] | None = None
    """Requests with a lower number are served first; 0 if null."""


class StreamOptions(RequestPart):
    """Options of a stream."""

    include_usage: bool = False
    """Send a last piece with the usage and no choices."""
    include_obfuscation: bool | None = None
    """Accepted and not used."""
    continuous_usage_stats: bool | None = None
    """With ``include_usage``: send the usage so far with every piece."""


class SamplingFields(ScheduledRequest):
    """The fields that chat and text completions and responses share; null means the default."""

    stream: bool | None = False
    """Send the answer piece by piece, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Options of the stream."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    seed: int | None = None
    """With a seed, the same request has the same answer; -1 or null draws a seed, at random or from
    the server's ``--seed``."""
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Biases | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedTokens | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    structured_outputs: StructuredField | None = None

    will_return: StrictBool | None = None
    kv_hints: KvHints | None = None
    """An orchestrator's advice on the KV cache, in the envelope of vLLM, SGLang and TensorRT-LLM:
    ``kv.retain`` has the effect of ``will_return``; other actions are logged and ignored."""
    deadline_seconds: DeadlineSeconds | None = None
    """Seconds after which a request that has not ended fails with 408."""
    session_id: str | None = Field(default=None, max_length=1024)
    """Another name of ``prompt_cache_key``, used if ``prompt_cache_key`` is null."""
