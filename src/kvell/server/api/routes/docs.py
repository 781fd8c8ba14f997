"""``/docs`` and ``/openapi.json``: the page of the API and its document."""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import msgspec
from fastapi import FastAPI, Response

from kvell.server.api.bodies.completions import JSON_TYPE
from kvell.server.map.page import Page, policy_headers, static_text
from kvell.server.map.recorder import LatestAnswer

Document = Mapping[str, Any]
REF = "#/components/schemas/"
STYLE = static_text("docs.css")
_BOUNDS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "minLength": "at least",
    "maxLength": "at most",
    "minItems": "at least",
    "maxItems": "at most",
}
"""Words of the bounds of a value."""
_LITERAL = re.compile(r"``(.+?)``", re.DOTALL)


def make_docs_page(document: Document) -> Page:
    title = f"{document['info']['title']} API"
    schemas = document.get("components", {}).get("schemas", {})
    routes = [
        _route(method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    objects = [_object(name, schema) for name, schema in sorted(schemas.items())]
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f'<h1>{escape(title)}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>'
        f"</p><h2>Routes</h2>{''.join(routes)}<h2>Objects</h2>{''.join(objects)}</body></html>\n"
    )
    return Page(html.encode(), policy_headers(STYLE))


def _route(method: str, path: str, operation: Document) -> str:
    first, *rest = str(operation.get("description", "")).split("\n\n")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    taken = f"<p>Body: {type_text(body['schema'])}</p>" if "schema" in body else ""
    rows = [
        _row(each["name"], each.get("schema", {}), is_required=each.get("required", False))
        for each in operation.get("parameters", ())
    ]
    details = "".join(f"<p>{_words(text)}</p>" for text in rest)
    return (
        f"<details><summary><code>{method} {escape(path)}</code> {_words(first)}</summary>"
        f"{details}{taken}{_table(rows)}</details>"
    )


def _object(name: str, schema: Document) -> str:
    required = schema.get("required", ())
    rows = [
        _row(field, each, is_required=field in required)
        for field, each in schema.get("properties", {}).items()
    ]
    words = _words(str(schema.get("description", "")))
    return (
        f'<details id="{escape(name)}" open><summary><code>{escape(name)}</code></summary>'
        f"<p>{words}</p>{_table(rows)}</details>"
    )


def _row(name: str, schema: Document, *, is_required: bool) -> str:
    default = json.dumps(schema.get("default"), ensure_ascii=False)
    usual = "required" if is_required else f"<code>{escape(default)}</code>"
    return f"<tr><td><code>{escape(name)}</code></td><td>{type_text(schema)}</td><td>{usual}</td>"


def _table(rows: Sequence[str]) -> str:
    head = "<tr><th>field</th><th>type</th><th>default</th></tr>"
    return f"<table>{head}{'</tr>'.join(rows)}</tr></table>" if rows else ""


def type_text(schema: Document) -> str:
    """Return the type of a value in HTML; names of objects are links to them."""
    if name := str(schema.get("$ref", "")).removeprefix(REF):
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(type_text(each) for each in schema[key]))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"list of {type_text(schema.get('items', {}))}"
    return ", ".join([kind, *_bounds(schema)])


def _bounds(schema: Document) -> Iterator[str]:
    for key, word in _BOUNDS.items():
        if key in schema:
            unit = " characters" if "Length" in key else ""
            yield f"{word} {schema[key]}{unit}"


def _words(text: str) -> str:
    return _LITERAL.sub(r"<code>\1</code>", escape(" ".join(text.split())))


PATH = "/docs"
DOCUMENT_PATH = "/openapi.json"


class DocsApi:
    """The handlers of the API's page and document, which are made when they are first asked for.

    :param root_path: a proxy's path of this server; "" for none.
    """

    def __init__(self, app: FastAPI, root_path: str = "") -> None:
        self._app, self._root_path = app, root_path
        make = partial(asyncio.to_thread, self._make)
        self._made = LatestAnswer(make, time.monotonic, math.inf)

    def install(self) -> None:
        for path, handler in ((PATH, self.page), (DOCUMENT_PATH, self.document)):
            self._app.add_api_route(path, handler, methods=["GET"], include_in_schema=False)

    async def page(self) -> Response:
        page, _ = await self._made.latest()
        return Response(page.html, media_type="text/html", headers=page.headers)

    async def document(self) -> Response:
        _, document = await self._made.latest()
        return Response(document, media_type=JSON_TYPE)

    def _make(self) -> tuple[Page, bytes]:
        schema = self._app.openapi()
        at_root = {"servers": [{"url": self._root_path}]} if self._root_path else {}
        return make_docs_page(schema), msgspec.json.encode({**schema, **at_root})
