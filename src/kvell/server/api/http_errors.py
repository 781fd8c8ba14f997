"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``.

Paths below ``/v1/messages`` use Anthropic's: ``{"type": "error", "error": {"type", "message"}}``.
Paths below ``/api`` use Ollama's: ``{"error": message}``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette._utils import get_route_path  # the router's function: guards must see the same path
from starlette.exceptions import HTTPException
from starlette.types import Scope

from kvell.equivalents.entry import nearest
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
from kvell.server.text.text_bounds import ContextTooLong
from kvell.server.text.text_stream import DeadlineExceeded, RequestRefused


def served_path(scope: Scope) -> str:
    return get_route_path(scope) or "/"


Error = Mapping[str, Any]
"""A validation error of pydantic."""
NOT_JSON = "the body is not valid JSON"
LONGEST_TAG = 64


def complaint(errors: Sequence[Error], body: object) -> tuple[str, str | None]:
    """Return a message about a body that its schema refuses, and the name of the field.

    A value of a union has errors of each member.  Only the errors at the deepest place count: they
    are those of the closest member.  The message repeats only names and types of the body.

    :param errors: at least one; their places begin with ``body``.
    """
    if errors[0]["type"] == "json_invalid":
        return NOT_JSON, None
    places = [_place(error, body) for error in errors]
    field = places[0][:1]
    near = [
        (place, error) for place, error in zip(places, errors, strict=True) if place[:1] == field
    ]
    deepest = max((place for place, _ in near), key=len)
    words = dict.fromkeys(_words(error) for place, error in near if place == deepest)
    name = _written(deepest)
    return f"{name or 'body'}: {', or '.join(words)}", name or None


def _place(error: Error, body: object) -> list[str | int]:
    """Return the keys and indices that lead to a value, without names of union members."""
    place: list[str | int] = []
    parts = list(error["loc"])[1:] if error["loc"][:1] == ("body",) else list(error["loc"])
    value: Any = body
    for number, part in enumerate(parts):
        if _has(value, part):
            value = value[part]
        elif error["type"] != "missing" or number + 1 < len(parts):
            continue
        place.append(part)
    return place


def _has(value: object, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(value, list) and 0 <= part < len(value)
    return isinstance(value, Mapping) and part in value


def _words(error: Error) -> str:
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        expected = error["ctx"].get("expected_tags")
        tag = str(error["ctx"].get("tag", ""))[:LONGEST_TAG]
        remedy = f"use one of {expected}" if expected else "say its type"
        return f"type={tag}: is not served; {remedy}" if tag else f"has no type; {remedy}"
    return str(error["msg"])


def _written(place: Sequence[str | int]) -> str:
    """Return a place as a name, such as ``messages[0].content``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


LONGEST_PATH = 200
AT_THE_START = "models are given when the server starts: kvell serve MODEL [MODEL …]"
"""The remedy for requests that would change which models are served."""
MANAGED = frozenset(f"/api/{name}" for name in ("copy", "create", "delete", "push"))
"""Paths of Ollama that manage models."""
BLOBS = "/api/blobs/"
"""The prefix of Ollama's paths for files of models."""
LEAST_PARTS = 2
"""The parts that a path and a served path must share at their ends to be near."""


def unknown_path(path: str, served: Iterable[str], shown_at: Collection[str]) -> str:
    """Return a message about a path that is not served.

    :param served: paths that are served, without those that have parameters.
    :param shown_at: paths that list what is served.
    """
    if path.rstrip("/") in MANAGED or path.startswith(BLOBS):
        return f"path={path[:LONGEST_PATH]}: is not served; {AT_THE_START}"
    near = nearest_path(path[:LONGEST_PATH], served)
    remedy = f"see {' or '.join(shown_at)} for what is" if near is None else f"use {near}"
    return f"path={path[:LONGEST_PATH]}: is not served; {remedy}"


def nearest_path(path: str, served: Iterable[str]) -> str | None:
    """Return the served path that a client probably means; None if no path is near.

    A path is near if one of both ends with the other, as ``/chat/completions`` and
    ``/v1/v1/chat/completions`` do, or if they differ in few characters: parts with which both begin
    do not count, so that ``/api/push`` is not near to ``/api/ps``.
    """
    parts = _parts(path)
    paths = sorted(served)
    ends = [each for each in paths if _shares_end(parts, _parts(each))]
    if ends:
        return max(ends, key=lambda each: len(_parts(each)))
    near = [each for each in paths if _differ_little(parts, _parts(each))]
    return next(iter(nearest(path.lower(), near, 0.0)), None)


def _parts(path: str) -> list[str]:
    return [part for part in path.lower().split("/") if part]


def _shares_end(parts: list[str], served: list[str]) -> bool:
    shared = min(len(parts), len(served))
    is_end = parts[len(parts) - shared :] == served[len(served) - shared :]
    return is_end and shared >= max(1, min(LEAST_PARTS, len(served)))


def _differ_little(parts: list[str], served: list[str]) -> bool:
    same = 0
    while same < min(len(parts), len(served)) and parts[same] == served[same]:
        same += 1
    rest = "/".join(served[same:])
    return bool(rest and nearest("/".join(parts[same:]), [rest]))


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
        code = "rate_limit_exceeded"
        seconds = error.retry_seconds
        return ApiError(429, str(error), error.unit, code=code, retry_seconds=seconds)
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
        refused = invalid_request(*complaint(error.errors(), error.body))
        return refused.response(served_path(request.scope))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = served_path(request.scope)
        text = str(error.detail)
        headers = error.headers or {}
        if "Allow" in headers:
            headers = {**headers, "Allow": _allowed(headers["Allow"])}
            taken = f"is not taken by {path[:LONGEST_PATH]}; use {headers['Allow']}"
            text = f"method={request.method}: {taken}"
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


@contextmanager
def named_as_sent(name: Callable[[str], str]) -> Iterator[None]:
    """Rename fields in errors of the block to the client's names."""
    try:
        yield
    except ChangeSomething as error:
        parts = (name(error.field), error.value, error.problem, error.remedy)
        raise type(error)(*parts, bound=error.bound) from error
    except RequestRefused as error:
        field = name(error.field)
        message = str(error)
        if error.field and message.startswith(error.field):
            message = field + message.removeprefix(error.field)
        raise RequestRefused(message, field, error.bound) from error
