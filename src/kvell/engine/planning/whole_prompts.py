"""Steps without chunked prefill (``--no-enable-chunked-prefill``), as vLLM 0.4 has them; pure.

::

    chunked   a: decode │ a: decode + b: 512 of 800 │ a: decode + b: 288 of 800 │ a, b: decode
    whole     a: decode │             b: 800        │         a, b: decode      │ a, b: decode

A step computes either whole prompts, as many as fit its budget, or decodes.  Prompts run first, so
decodes wait while there are prompts with a seat and pages.  A preempted request recomputes what it
lost in one step, too.

A prompt whose tokens are scored is still cut into chunks: each of its tokens has a row of logits,
and a step has only as many rows as seats.
"""

from dataclasses import replace

from kvell.engine.requests.limits import Limits
from kvell.engine.requests.request import Request
from kvell.errors import ChangeSomething
from kvell.memory import Layout, longest_request

FLAG = "--no-enable-chunked-prefill"


def least_end(request: Request, wanted: int, limits: Limits) -> int:
    """Return up to which token a step must compute a request at least, or else defer it.

    :param wanted: up to which token it will be computed if memory allows it.
    :returns: a number of tokens above ``request.computed``.
    """
    if limits.enable_chunked_prefill or request.is_scored:
        return request.computed + 1
    return wanted


def has_budget(request: Request, budget: int, limits: Limits) -> bool:
    """Return whether a step's budget is enough for the least that it must compute of a request."""
    if limits.enable_chunked_prefill or request.is_scored:
        return budget > 0
    return budget >= request.remaining


def without_chunks(limits: Limits, layout: Layout) -> Limits:
    """Return limits with whole prompts: one step and the pool bound the length of a request.

    A whole prompt takes pages of windows for all of its tokens together, so fewer tokens may fit
    than with chunks.
    """
    step_tokens = limits.max_num_batched_tokens
    longest = longest_request(layout, min(limits.max_model_len, step_tokens), step_tokens)
    return replace(
        limits, enable_chunked_prefill=False, max_model_len=longest, min_chunk_tokens=step_tokens
    )


def check_whole_prompts(max_num_batched_tokens: int, max_model_len: int) -> None:
    """Check that one step can compute any prompt, and recompute any request.

    :raises ChangeSomething: if it cannot.
    """
    if max_num_batched_tokens < max_model_len:
        problem = f"is below --max-model-len {max_model_len}, and {FLAG} keeps prompts whole"
        remedy = f"use at least {max_model_len}, or a lower --max-model-len"
        raise ChangeSomething("--max-num-batched-tokens", max_num_batched_tokens, problem, remedy)


def require_whole_prompts(limits: Limits, *, shares_pool: bool, parks: bool) -> None:
    """Check that steps of whole prompts can always be computed.

    :param shares_pool: activations share the pool, where a step may get fewer than it asks for.
    :param parks: decodes are parked for prompts, and resumed one by one.
    :raises ValueError: if they cannot.
    """
    if limits.enable_chunked_prefill:
        return
    longest = limits.max_model_len
    if longest > limits.max_num_batched_tokens:
        raise ValueError(
            f"max_num_batched_tokens is below max_model_len={longest}: no whole prompts"
        )
    if longest > limits.min_chunk_tokens:
        raise ValueError(f"min_chunk_tokens is below max_model_len={longest}: no whole prompts")
    if shares_pool or parks:
        raise ValueError("whole prompts need separate activations and no parked decodes")
