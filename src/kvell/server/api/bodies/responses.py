"""The bodies and events of ``/v1/responses``."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvell.server.api.bodies.completions import Body, Heading, cache_details
from kvell.server.api.http_errors import ApiError
from kvell.server.api.schemas.responses import ResponsesRequest
from kvell.server.text.text_stream import Usage

_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key"),
    *("safety_identifier", "user"),
)


def response_body(
    heading: Heading,
    request: ResponsesRequest,
    tools: Sequence[Mapping[str, Any]],
    status: str,
    /,
    **more: Any,
) -> Body:
    """Return a response: fields of the request, and the answer so far.

    :param request: has the temperature and ``top_p`` that the answer is sampled with.
    :param tools: checked, in the format of chat completions.
    :param more: the output and other fields that are already known.
    """
    begun: Body = {"output": [], "usage": None, "error": None, "incomplete_details": None}
    return {
        "id": heading.answer_id,
        "object": "response",
        "created_at": heading.created,
        "status": status,
        "background": False,
        "model": heading.model,
        "previous_response_id": None,
        **{name: getattr(request, name) for name in _ECHOED},
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": request.temperature,
        "text": _text_body(request),
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool_body(tool["function"]) for tool in tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        **begun,
        **more,
    }


def ended_body(
    heading: Heading,
    request: ResponsesRequest,
    tools: Sequence[Mapping[str, Any]],
    items: Sequence[Body],
    usage: Body,
    *,
    is_whole: bool,
) -> Body:
    """Return a response whose answer has ended, by itself or at the limit of its tokens."""
    answer = {"output": list(items), "usage": usage}
    if is_whole:
        return response_body(heading, request, tools, "completed", **answer)
    details = {"reason": "max_output_tokens"}
    return response_body(
        heading, request, tools, "incomplete", incomplete_details=details, **answer
    )


def failed_event(begun: Body, error: ApiError) -> Body:
    """Return the event of a failure.

    :param begun: the response as it was sent at its beginning.
    """
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    failure = {"code": code, "message": error.message}
    return {
        "type": "response.failed",
        "response": begun | {"status": "failed", "error": failure},
    }


def response_usage(usage: Usage, reasoning_tokens: int) -> Body:
    """Return ``usage``; cached tokens were not computed again."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cache_details(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": min(reasoning_tokens, usage.completion_tokens)
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_body(request: ResponsesRequest) -> Body:
    text = request.text
    if text is None or text.format is None:
        form: Body = {"type": "text"}
    elif text.format.type == "json_schema":
        form = text.format.model_dump(by_alias=True)
    else:
        form = {"type": text.format.type}
    return {"format": form, "verbosity": (text and text.verbosity) or "medium"}


def _tool_body(function: Mapping[str, Any]) -> Body:
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", **{name: function.get(name) for name in fields}}
