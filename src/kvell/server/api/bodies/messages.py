"""The bodies and events of ``/v1/messages``."""

from collections.abc import Sequence

from kvell.server.api.bodies.completions import Body, Heading
from kvell.server.api.http_errors import ApiError
from kvell.server.text.text_stream import TextDelta, Usage


def message_answer(heading: Heading, blocks: Sequence[Body], ended: Body, usage: Body) -> Body:
    """Return a message with the answer so far.

    :param ended: from :func:`how_ended`.
    """
    head = {"id": heading.answer_id, "type": "message", "role": "assistant"}
    return {**head, "model": heading.model, "content": list(blocks), **ended, "usage": usage}


def how_ended(delta: TextDelta | None, *, calls: bool) -> Body:
    """Return the stop reason and the stop sequence of an answer.

    :param delta: last piece of the answer; None if no piece has arrived.
    :param calls: whether the answer calls tools.
    """
    reason = sequence = None
    if delta is not None and delta.finish_reason is not None:
        sequence = delta.stop_reason
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def message_usage(usage: Usage, thinking_tokens: int) -> Body:
    """Return ``usage``: prompt tokens read from the cache, written to the cache, and others."""
    details = {"thinking_tokens": min(thinking_tokens, usage.completion_tokens)}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": details,
        "service_tier": "standard",
    }


def error_event(error: ApiError) -> Body:
    return dict(error.anthropic_body())
