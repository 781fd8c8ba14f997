"""Bodies of ``/v1/responses``, and its events."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvell.server.api.bodies.completions import Body, Heading, cache_details
from kvell.server.api.http_errors import ApiError
from kvell.server.api.schemas.responses import ResponsesRequest
from kvell.server.text.text_stream import Usage

_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)


def response_body(
    heading: Heading,
    asked: ResponsesRequest,
    tools: Sequence[Mapping[str, Any]],
    status: str,
    /,
    **more: Any,
) -> Body:
    """A response: what was asked, and what there is of the answer.

    :param asked: with the temperature and ``top_p`` that it is sampled by.
    :param tools: checked, in chat's form.
    :param more: its output and whatever else is known now.
    """
    begun: Body = {"output": [], "usage": None, "error": None, "incomplete_details": None}
    return {
        "id": heading.answer_id,
        "object": "response",
        "created_at": heading.created,
        "status": status,
        "background": False,
        "model": heading.model,
        **{name: getattr(asked, name) for name in _ECHOED},
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": asked.temperature,
        "text": _text_body(asked),
        "tool_choice": asked.tool_choice or "auto",
        "tools": [_tool_body(tool["function"]) for tool in tools],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": asked.top_p,
        "truncation": "disabled",
        **begun,
        **more,
    }


def ended_body(
    heading: Heading,
    asked: ResponsesRequest,
    tools: Sequence[Mapping[str, Any]],
    items: Sequence[Body],
    usage: Body,
    *,
    is_whole: bool,
) -> Body:
    """A response whose answer has ended: by itself, or at the limit of its tokens."""
    told = {"output": list(items), "usage": usage}
    if is_whole:
        return response_body(heading, asked, tools, "completed", **told)
    details = {"reason": "max_output_tokens"}
    return response_body(heading, asked, tools, "incomplete", incomplete_details=details, **told)


def failed_event(begun: Body, error: ApiError) -> Body:
    """The event of a failure.

    :param begun: the response as it was told before.
    """
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    failure = {"code": code, "message": error.message}
    return {
        "type": "response.failed",
        "response": begun | {"status": "failed", "error": failure},
    }


def response_usage(usage: Usage, reasoning_tokens: int) -> Body:
    """``usage``; cached tokens were not computed again.

    :param reasoning_tokens: of the reasoning's text.
    """
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cache_details(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": min(reasoning_tokens, usage.completion_tokens)
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_body(asked: ResponsesRequest) -> Body:
    text = asked.text
    if text is None or text.format is None:
        told: Body = {"type": "text"}
    elif text.format.type == "json_schema":
        told = text.format.model_dump(by_alias=True)
    else:
        told = {"type": text.format.type}
    return {"format": told, "verbosity": (text and text.verbosity) or "medium"}


def _tool_body(function: Mapping[str, Any]) -> Body:
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", **{name: function.get(name) for name in fields}}
