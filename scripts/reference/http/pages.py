"""Pages of the HTTP API, a page for each route, from the server's own OpenAPI document."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from kvell.engine.protocol.statistics import InstanceFacts
from kvell.front.front import Front
from kvell.server.api.door.access_guard import METRICS, OPEN, OPERATORS
from kvell.server.api.openai_api import build_app
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.testing.instance import ByteText, FakeEngine
from scripts.reference.http.errors import errors_page
from scripts.reference.http.schemas import SCHEMAS, Objects
from scripts.reference.rst import code, contents, heading, page, table

FOLDER = PurePosixPath("http")
DOCUMENT = "openapi.json"
INTRODUCTION = """
``kvell serve`` listens at ``http://127.0.0.1:8000`` unless told otherwise.  Bodies and answers are
JSON.  A field that a route does not know is refused.  Errors have OpenAI's shape, see
:doc:`errors`.  The same as a machine reads it: :download:`openapi.json <openapi.json>`, which a
server gives at ``/openapi.json``.  At ``/`` it shows :doc:`its memory map </docs/memory-map>`.
"""


class _Unstarted(Front):
    """A front without instances that says what a fake one would serve."""

    @property
    def facts(self) -> InstanceFacts:
        """The facts of the fake engine."""
        return FakeEngine().ready().facts


def openapi_document() -> dict[str, Any]:
    """Return what a server says of its own routes; no model is loaded, nothing is started."""
    front = _Unstarted(["unused"])
    return build_app(front, ByteText(), ServerMetrics("fake")).openapi()


@dataclass(frozen=True)
class Route:
    """One method of one path.

    :param operation: what the OpenAPI document says of it.
    """

    method: str
    path: str
    operation: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The method and the path."""
        return f"{self.method} {self.path}"

    @property
    def name(self) -> str:
        """The name of its page."""
        words = "".join(c if c.isalnum() or c == "_" else " " for c in self.path).split()
        return "-".join((self.method.lower(), *words))

    @property
    def body(self) -> str:
        """The name of the object that it takes; "" if it takes none."""
        content = self.operation.get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        return str(schema.get("$ref", "")).removeprefix(SCHEMAS)

    @property
    def description(self) -> str:
        """What it does, in reStructuredText."""
        return str(self.operation.get("description", ""))

    @property
    def key(self) -> str:
        """Who may use it on a server with API keys."""
        if self.path in OPEN:
            return "none"
        if self.path == METRICS:
            return "none; an operator's with ``--guard-metrics``"
        return "an operator's" if self.path.startswith(OPERATORS) else "any"


def routes(document: Mapping[str, Any]) -> list[Route]:
    """Return all routes of an OpenAPI document, in its order."""
    return [
        Route(method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def http_pages() -> dict[PurePosixPath, str]:
    """Return the text of every page by its path, and the document itself."""
    document = openapi_document()
    known = routes(document)
    schemas = document["components"]["schemas"]
    pages = {f"{one.name}.rst": _route(one, schemas) for one in known}
    pages["errors.rst"] = errors_page(schemas)
    pages["index.rst"] = _index(known)
    pages[DOCUMENT] = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return {FOLDER / name: text for name, text in pages.items()}


def _index(known: list[Route]) -> str:
    rows = (
        (f":doc:`{one.title} <{one.name}>`", one.description.partition("\n\n")[0], one.key)
        for one in known
    )
    columns = ("Route", "What it does", "API key")
    names = [*(one.name for one in known), "errors"]
    return page(
        heading("HTTP API"),
        INTRODUCTION,
        table(columns, (30, 50, 20), rows),
        contents(names, hidden=True),
    )


def _route(route: Route, schemas: Mapping[str, Any]) -> str:
    objects = Objects(route.name, schemas)
    return page(
        heading(route.title),
        route.description,
        f"API key, on a server that has some: {route.key}.",
        *_parameters(route, objects),
        *_body(route, objects),
        *_answers(route),
        *_nested(route, objects),
    )


def _parameters(route: Route, objects: Objects) -> Iterator[str]:
    found = route.operation.get("parameters", ())
    if found:
        yield heading("Parameters", 1)
        rows = ((code(one["name"]), one["in"], objects.type_text(one["schema"])) for one in found)
        yield table(("Name", "In", "Type"), (30, 20, 50), rows)


def _body(route: Route, objects: Objects) -> Iterator[str]:
    if route.body:
        yield heading("Body", 1)
        yield str(objects.schemas[route.body].get("description", ""))
        yield objects.fields(route.body)


def _answers(route: Route) -> Iterator[str]:
    yield heading("Answers", 1)
    rows = (
        (code(status), one["description"], ", ".join(map(code, one.get("content", {}))))
        for status, one in route.operation["responses"].items()
    )
    yield table(("Status", "Meaning", "Content"), (15, 50, 35), rows)
    yield "4XX and 5XX are described under :doc:`errors`."


def _nested(route: Route, objects: Objects) -> Iterator[str]:
    """The objects in the body, each with a label on this page."""
    if not route.body:
        return
    names = objects.reached(objects.schemas[route.body])
    if names:
        yield heading("Objects in the body", 1)
    for name in names:
        yield _object(objects, name)


def _object(objects: Objects, name: str) -> str:
    description = str(objects.schemas[name].get("description", ""))
    return page(heading(name, 2, objects.label(name)), description, objects.fields(name))
