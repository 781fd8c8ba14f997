"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``.

Paths below ``/v1/messages`` use Anthropic's: ``{"type": "error", "error": {"type", "message"}}``.
Paths below ``/api`` use Ollama's: ``{"error": message}``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from kvell.errors import (
    Bound,
    ChangeSomething,
    InstanceDied,
    KvellError,
    RequestFailed,
    TryLater,
)
from kvell.server.access.accounts import RateExceeded
from kvell.server.access.bodies import WHOLE
from kvell.server.api.door.browsers import served_path
from kvell.server.api.invalid_bodies import complaint
from kvell.server.api.unknown_paths import unknown_path, wrong_method
from kvell.server.text.text_bounds import ContextTooLong
from kvell.server.text.text_stream import DeadlineExceeded, RequestRefused

LONGEST_VALUE = 500
Described = Mapping[int | str, dict[str, Any]]
"""Descriptions of responses by status, for the OpenAPI document."""
ANTHROPIC = "/v1/messages"
"""Prefix of the paths with Anthropic's format."""
OLLAMA = "/api/"
"""Prefix of the paths with Ollama's format."""
MODELS = "/v1/models"
NOT_FOUND = HTTPStatus(404).phrase
"""The detail of an exception that only means that no route has the path."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True)
class ApiError:
    """An HTTP error: its status and the fields of its body.

    :param retry_seconds: value of ``Retry-After`` if the status is 429 or 503.
    """

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_seconds: int = 1

    def body(self) -> dict[str, dict[str, str | None]]:
        fields = {"message": self.message, "type": self.type}
        return {"error": {**fields, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, str | dict[str, str]]:
        usual = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, usual)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> Response:
        """Return the HTTP response; 429 and 503 have ``Retry-After``.

        :param path: path of the request; it selects OpenAI's, Anthropic's or Ollama's format.
        """
        headers = {"Retry-After": str(self.retry_seconds)} if self.status in (429, 503) else None
        content = msgspec.json.encode(self._body_at(path))
        return Response(content, self.status, headers, media_type="application/json")

    def _body_at(self, path: str) -> Mapping[str, object]:
        if path.startswith(ANTHROPIC):
            return self.anthropic_body()
        return {"error": self.message} if path.startswith(OLLAMA) else self.body()


class ErrorFields(BaseModel):
    """The fields of an error."""

    message: str
    """The problem and what to change, in one line."""
    type: str
    """Kind of the error."""
    param: str | None
    """The field that caused the error, if one did."""
    code: str | None
    """A more specific kind, for programs; null for most errors."""


class ErrorBody(BaseModel):
    """The body of an error."""

    error: ErrorFields
    """The fields of the error."""


class AnthropicErrorFields(BaseModel):
    """The fields of an error in Anthropic's format."""

    type: str
    """Kind of the error."""
    message: str
    """The problem and what to change, in one line."""


class AnthropicErrorBody(BaseModel):
    """The body of an error in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicErrorFields
    """The fields of the error."""


class OllamaErrorBody(BaseModel):
    """The body of an error in Ollama's format."""

    error: str
    """The problem and what to change, in one line."""


OLLAMA_DESCRIBED: Described = MappingProxyType(
    {"4XX": {"model": OllamaErrorBody, "description": "Change the request, or retry later"}}
)
"""Errors of Ollama's routes, for the OpenAPI document."""
ANTHROPIC_DESCRIBED: Described = MappingProxyType(
    {"4XX": {"model": AnthropicErrorBody, "description": "Change the request, or retry later"}}
)
"""Errors of Anthropic's routes, for the OpenAPI document."""
DESCRIBED: Described = MappingProxyType(
    {
        "4XX": {"model": ErrorBody, "description": "Change the request, or retry later"},
        "5XX": {"description": "The server failed, or no instance serves"},
    }
)
"""Errors of every route, for the OpenAPI document."""


class UnknownModel(KvellError):  # noqa: N818
    """A request for a model that is not served."""


def invalid_request(message: str, param: str | None = None, status: int = 400) -> ApiError:
    return ApiError(status, message, "invalid_request_error", param)


def api_error(error: Exception) -> ApiError:
    """Return the error that a client receives for an exception, without details of a bug."""
    if isinstance(error, ContextTooLong):
        code = "context_length_exceeded"
        return ApiError(400, str(error), "invalid_request_error", error.field, code)
    if isinstance(error, ChangeSomething):
        return _must_change(error)
    if isinstance(error, UnknownModel):
        return ApiError(404, str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, RequestRefused):
        return invalid_request(str(error), error.field or None)
    if isinstance(error, InstanceDied):
        return ApiError(503, str(error), "service_unavailable_error")
    if isinstance(error, RateExceeded):
        text = str(error)
        code = "rate_limit_exceeded"
        seconds = error.retry_seconds
        return ApiError(429, text, error.unit, code=code, retry_seconds=seconds)
    if isinstance(error, TryLater):
        return ApiError(429, str(error), "rate_limit_error", code="too_many_requests")
    if isinstance(error, DeadlineExceeded):
        return ApiError(408, str(error), "timeout_error", "deadline_seconds", "deadline_exceeded")
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), "server_error")
    return ApiError(500, "internal error", "server_error")


def _must_change(error: ChangeSomething) -> ApiError:
    """Return an error that names the field; a long value is truncated."""
    value = str(error.value)
    if len(value) > LONGEST_VALUE:
        value = f"{value[:LONGEST_VALUE]}…"
    text = f"{error.field}={value}: {error.problem}; {error.remedy}"
    return invalid_request(text, None if error.field == WHOLE else error.field)


def validation_error(error: RequestValidationError) -> ApiError:
    """Return the error of an invalid body; it repeats only names and types of the body."""
    return invalid_request(*complaint(error.errors(), error.body))


def _allowed(methods: str) -> str:
    """Return the methods that a 405 names, sorted; HEAD is served where GET is."""
    names = set(methods.split(", "))
    return ", ".join(sorted(names | {"HEAD"} if "GET" in names else names))


def install(
    app: FastAPI, rejected: Callable[[Bound], None], shown_at: Collection[str] = (MODELS,)
) -> None:
    """Answer every error of an app in the format of the request's path.

    :param rejected: called with each bound that a request exceeds.
    :param shown_at: paths that list what is served, for the answer to an unknown path.
    """

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error).response(served_path(request.scope))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = served_path(request.scope)
        text = str(error.detail)
        headers = error.headers or {}
        if "Allow" in headers:
            headers = {**headers, "Allow": _allowed(headers["Allow"])}
            text = wrong_method(request.method, path, headers["Allow"])
        elif text == NOT_FOUND:
            served = {each.path for each in app.routes if isinstance(each, APIRoute)}
            text = unknown_path(path, [each for each in served if "{" not in each], shown_at)
        response = invalid_request(text, status=error.status_code).response(path)
        response.headers.update(headers)
        return response

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, KvellError) and error.bound is not None:
            rejected(error.bound)
        return api_error(error).response(served_path(request.scope))

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(KvellError, on_error)
    app.add_exception_handler(Exception, on_error)
