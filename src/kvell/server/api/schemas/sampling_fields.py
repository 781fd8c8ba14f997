"""Fields that several bodies share: those of scheduling, and those of sampling.

``kv_hints`` 0.1 is an orchestrator's advice on the KV cache of a request, in the envelope of vLLM,
SGLang and TensorRT-LLM.  Kvell follows the actions that it has an equivalent of; it logs and
ignores the others.
"""

from array import array
from collections.abc import Mapping
from typing import Annotated, Literal, NoReturn

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from kvell.engine.protocol.sampling_params import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_BIASES
from kvell.errors import ChangeSomething
from kvell.server.api.schemas.formats import StructuredField
from kvell.server.api.schemas.request_body import RequestBody, RequestPart

MAX_ACTIONS = 64
MAX_DIRECTIVES = 128
MAX_PRIORITY = 100
MAX_DURATION_SECONDS = 30 * 86_400
RETAIN = "kv.retain"
_DIRECTIVE_FIELDS = frozenset({"start", "end", "priority", "duration", "covers_output"})

Name = Annotated[str, Field(min_length=1, max_length=256)]


class KvHintAction(BaseModel):
    """One piece of advice."""

    model_config = ConfigDict(extra="forbid")
    action_id: Name
    """The sender's id of the action."""
    action_type: Name
    """Kind of advice: ``kv.retain`` is followed, others are logged and ignored."""
    action_version: Name
    """Version of the payload: 1, for ``kv.retain``."""
    payload: dict[str, object]
    """With ``kv.retain``: ``directives`` with ``priority`` (0 to 100), ``start`` and ``end``."""

    @property
    def is_followed(self) -> bool:
        major = self.action_version.partition(".")[0]
        return self.action_type == RETAIN and major == "1"


class KvHints(BaseModel):
    """The envelope of ``kv_hints``."""

    model_config = ConfigDict(extra="forbid")
    protocol_version: Literal["0.1"]
    """Version of the envelope."""
    message_id: Name
    """The sender's id of the message."""
    actions: Annotated[list[KvHintAction], Field(max_length=MAX_ACTIONS, fail_fast=True)]
    """Pieces of advice, at most 64; each is independent."""

    def will_return(self) -> bool | None:
        """Return whether a later prompt will begin with this one; None if no action implies it.

        A directive that protects tokens implies that a later prompt has them; one that releases
        the whole prompt implies the opposite.  The last action that implies either counts.

        :raises ChangeSomething: naming an invalid field of an action that is followed.
        """
        result: bool | None = None
        for index, action in enumerate(self.actions):
            if action.is_followed:
                returns = _returns(f"kv_hints.actions[{index}].payload", action.payload)
                result = result if returns is None else returns
        return result

    def find_ignored(self) -> list[str]:
        others = [action for action in self.actions if not action.is_followed]
        return [f"{action.action_type}@{action.action_version}" for action in others]


def _returns(field: str, payload: Mapping[str, object]) -> bool | None:
    scope = payload.get("scope")
    given = payload.get("directives")
    if scope is not None and not isinstance(scope, str):
        raise ChangeSomething(f"{field}.scope", "…", "is not text", "leave it out")
    if not isinstance(given, list) or len(given) > MAX_DIRECTIVES:
        remedy = f"send a list of at most {MAX_DIRECTIVES}"
        raise ChangeSomething(f"{field}.directives", "…", "is not a list of directives", remedy)
    read = [_directive(f"{field}.directives[{index}]", item) for index, item in enumerate(given)]
    if any(priority > 0 for priority, _ in read):
        return True
    return False if any(is_whole for _, is_whole in read) else None


def _directive(field: str, given: object) -> tuple[int, bool]:
    """Return a directive's priority, and whether its tokens are the whole prompt.

    It makes the checks that vLLM makes.
    """

    def refuse(name: str, problem: str, remedy: str) -> NoReturn:
        raise ChangeSomething(f"{field}{name}", "…", problem, remedy)

    if not isinstance(given, dict):
        refuse("", "is not an object", 'send {"priority": …, "start": …, "end": …}')
    for name in given:
        if name not in _DIRECTIVE_FIELDS:
            names = ", ".join(sorted(_DIRECTIVE_FIELDS))
            refuse(f".{str(name)[:40]}", "is unknown", f"use {names}")
    priority = _count(given.get("priority"))
    start = _count(given.get("start", 0))
    end = None
    if priority is None or priority > MAX_PRIORITY:
        refuse(".priority", f"is not a whole number from 0 to {MAX_PRIORITY}", "use 0 to release")
    if start is None:
        refuse(".start", "is not a position", "use 0 for the beginning")
    if given.get("end") is not None:
        end = _count(given["end"])
        if end is None or end <= start:
            refuse(".end", "is not a position after start", "use null for the end")
    covers = given.get("covers_output", False)
    duration = given.get("duration")
    if not isinstance(covers, bool):
        refuse(".covers_output", "is neither true nor false", "leave it out")
    if covers and given.keys() & {"start", "end"}:
        refuse(".covers_output", "cannot be combined with start or end", "leave these out")
    is_number = isinstance(duration, int | float) and not isinstance(duration, bool)
    if duration is not None and not (is_number and 0 <= duration <= MAX_DURATION_SECONDS):
        problem = f"is not a number of seconds up to {MAX_DURATION_SECONDS}"
        refuse(".duration", problem, "use null for no end")
    return priority, not covers and start == 0 and end is None


def _count(value: object) -> int | None:
    """Return a whole number that is 0 or more; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value


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
