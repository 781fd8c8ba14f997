"""The page of HTTP errors: what the server's own table makes of each kind of error."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvell.errors import ChangeSomething, InstanceDied, RequestFailed, TryLater
from kvell.server.access.accounts import RateExceeded
from kvell.server.api.door.access_guard import NO_KEY, NO_OPERATOR
from kvell.server.api.http_errors import (
    ApiError,
    UnknownModel,
    api_error,
    invalid_request,
)
from kvell.server.text.text_bounds import ContextTooLong
from kvell.server.text.text_stream import DeadlineExceeded, RequestRefused
from scripts.reference.http.schemas import Objects
from scripts.reference.rst import code, heading, page, table

TEXT = """
Every error has this shape.  ``message`` is one line that says what to change, and ``param`` names
the field, where one is to blame.  Answers with 429 and 503 carry ``Retry-After`` in seconds.
"""
REFUSED = ("field", "value", "is out of bounds", "use another value")
CAUSES: tuple[tuple[str, Exception | ApiError], ...] = (
    ("A field is unknown, missing, or out of its bounds.", ChangeSomething(*REFUSED)),
    ("The prompt leaves no room for output.", ContextTooLong(*REFUSED)),
    ("The engine can never serve the request.", RequestRefused("field=value: …", "field")),
    ("The API key is missing or wrong.", NO_KEY),
    ("The API key is not an operator's.", NO_OPERATOR),
    ("The model that the request names is not served.", UnknownModel("…")),
    ("``deadline_seconds`` have passed.", DeadlineExceeded("…")),
    ("The body is longer than the server takes.", invalid_request("…", status=413)),
    ("The key's limit of a minute is used up.", RateExceeded("tokens", 1, 1)),
    ("The line of waiting requests is full.", TryLater("…")),
    ("The instances that computed the request have died.", RequestFailed("…")),
    ("The server has a bug; the message shows nothing of it.", RuntimeError()),
    ("No instance serves just now.", InstanceDied("…")),
)
"""When an error comes, and what the server answers with."""


def errors_page(schemas: Mapping[str, Any]) -> str:
    """Return the page: the body of an error, and which statuses there are."""
    objects = Objects("errors", schemas)
    return page(
        heading("Errors"),
        TEXT,
        *(
            page(heading(name, 1, objects.label(name)), objects.fields(name))
            for name in ("ErrorBody", "ErrorFields")
        ),
        heading("Statuses", 1),
        table(("Status", "When", "type", "code"), (10, 45, 25, 20), _rows()),
    )


def _rows() -> Iterable[tuple[str, ...]]:
    for text, cause in CAUSES:
        error = cause if isinstance(cause, ApiError) else api_error(cause)
        yield code(str(error.status)), text, code(error.type), code(error.code or "")
