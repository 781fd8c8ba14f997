"""Requests and parts of plans, made by hand."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import TokenWork
from kvell.front.request_log import LogEntry
from kvell.vocabulary import RequestId

GREEDY = SamplingParams(temperature=0)
Holder = TypeVar("Holder", Submit, LogEntry)
SPEC_FIELDS = ("cache_salt", "model", "session", "images", "tensors", "priority", "pooling")


def spec_of(
    prompt: Sequence[int] | NDArray[np.int32],
    sampling: SamplingParams = GREEDY,
    request_id: str = "",
    **more: Any,
) -> RequestSpec:
    name = RequestId(request_id or uuid.uuid4().hex)
    return RequestSpec(name, to_token_bytes(prompt), sampling, **more)


def work_of(
    name: str,
    handle: int,
    start: int,
    count: int,
    token_ids: NDArray[np.int32] | None = None,
    sampling: SamplingParams | None = None,
    output_index: int = 0,
    prompt_tokens: int = 0,
    scores: int | None = None,
    **more: Any,
) -> TokenWork:
    """The work on some tokens of a request, which yields a token if it has ``sampling``.

    :param scores: number of likeliest tokens to report at each position of the prompt.
    :param more: further fields of the request or the work.
    """
    own = {field: more.pop(field) for field in SPEC_FIELDS if field in more}
    prompt = bytes(4 * prompt_tokens)
    params = sampling or SamplingParams()
    if scores is not None:
        params = replace(params, prompt_logprobs=scores)
    spec = RequestSpec(RequestId(name), prompt, params, **own)
    ids = np.zeros(count, np.int32) if token_ids is None else token_ids
    samples = sampling is not None
    return TokenWork(spec, handle, start, count, ids, samples, output_index, **more)


def with_spec(holder: Holder, **changes: Any) -> Holder:
    return replace(holder, spec=structs.replace(holder.spec, **changes))
