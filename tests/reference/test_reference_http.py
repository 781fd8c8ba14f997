"""Pages of the HTTP API: types, bounds and defaults in words, and every error's status."""

from typing import Any

import pytest

from kvell.errors import ChangeSomething
from kvell.server.api.door.access_guard import OPEN
from kvell.server.api.http_errors import api_error
from scripts.reference.http.errors import CAUSES, errors_page
from scripts.reference.http.fields import FieldText, field_text
from scripts.reference.http.pages import Route, openapi_document, routes
from scripts.reference.http.schemas import Objects

SCHEMAS: dict[str, Any] = {
    "ChatRequest": {
        "required": ["messages"],
        "properties": {
            "messages": {"type": "array", "items": {"$ref": "#/components/schemas/ChatMessage"}},
            "temperature": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "stream": {"type": "boolean", "default": False},
        },
    },
    "ChatMessage": {"properties": {"part": {"oneOf": [{"$ref": "#/components/schemas/TextPart"}]}}},
    "TextPart": {"properties": {"text": {"type": "string"}}},
}
OBJECTS = Objects("page", SCHEMAS)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string"}, "string"),
        ({}, "anything"),
        ({"type": "integer", "minimum": 0, "maximum": 4096.0}, "integer, 0 to 4,096"),
        ({"type": "number", "exclusiveMinimum": 0.0}, "number, more than 0"),
        ({"type": "number", "minimum": 1e-6}, "number, at least 1e-06"),
        ({"type": "string", "maxLength": 9}, "string, at most 9 characters"),
        ({"type": "array"}, "list: anything"),
        (
            {"type": "array", "maxItems": 3, "items": {"type": "integer", "minimum": 1}},
            "list of at most 3: integer, at least 1",
        ),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object of number"),
        ({"type": "object", "additionalProperties": True, "maxProperties": 2},
         "object, at most 2 names"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "string or boolean"),
        ({"anyOf": [{"type": "string"}, {"type": "string"}]}, "string"),
        ({"const": "text", "type": "string"}, '``"text"``'),
        ({"enum": ["a", None]}, '``"a"`` or ``null``'),
        ({"$ref": "#/components/schemas/TextPart"}, ":ref:`TextPart <page-textpart>`"),
    ],
)  # fmt: skip
def test_types_and_bounds_in_words(schema: dict[str, Any], words: str) -> None:
    assert OBJECTS.type_text(schema) == words


def test_objects_are_found_however_deep_they_are() -> None:
    assert OBJECTS.reached(SCHEMAS["ChatRequest"]) == ["ChatMessage", "TextPart"]
    assert OBJECTS.reached(SCHEMAS["TextPart"]) == []


def test_an_object_that_holds_itself_is_named_once() -> None:
    itself = {"Tree": {"properties": {"left": {"$ref": "#/components/schemas/Tree"}}}}
    assert Objects("p", itself).reached(itself["Tree"]) == ["Tree"]


def rows(text: str) -> list[list[str]]:
    cells = [line[5:].removeprefix("- ") for line in text.splitlines() if line.startswith("     ")]
    firsts = [line[7:] for line in text.splitlines() if line.startswith("   * - ")]
    return [[first, *cells[3 * i : 3 * i + 3]] for i, first in enumerate(firsts)]


def test_a_row_has_type_default_and_meaning() -> None:
    assert rows(OBJECTS.fields("ChatRequest"))[1:] == [
        [
            "``messages``",
            "list: :ref:`ChatMessage <page-chatmessage>`",
            "*required*",
            "The conversation so far, oldest first.",
        ],
        ["``temperature``", "number", "``1.0``", field_text("ChatRequest", "temperature").text],
        ["``stream``", "boolean", "``false``", field_text("ChatRequest", "stream").text],
    ]


def test_a_field_means_what_its_model_says_first() -> None:
    assert field_text("CompletionRequest", "max_tokens").text.startswith(
        "Maximum output tokens; 0 only"
    )
    assert field_text("ChatRequest", "max_tokens").text.startswith(
        "Maximum output tokens, at least 1"
    )


def test_a_field_of_another_name_in_json_is_found() -> None:
    assert field_text("StructuredField", "json").text == "A JSON schema, as an object or as text."


def test_a_field_may_mean_what_chat_or_the_engine_says() -> None:
    chat = field_text("ChatRequest", "chat_template_kwargs")
    assert field_text("ResponsesRequest", "chat_template_kwargs") == chat != FieldText("")
    top_p = field_text("ResponsesRequest", "top_p")
    assert (top_p.text[:4], top_p.default) == ("Keep", 1.0)
    assert field_text("ChatRequest", "nothing") == FieldText("")


@pytest.mark.parametrize(
    ("path", "key", "name"),
    [
        ("/health", "none", "get-health"),
        ("/v1/models/{name}", "any", "get-v1-models-name"),
        ("/debug/pages/{instance}/{large_page}", "an operator's",
         "get-debug-pages-instance-large_page"),
        ("/metrics", "none; an operator's with ``--guard-metrics``", "get-metrics"),
    ],
)  # fmt: skip
def test_a_route_knows_its_page_and_who_may_use_it(path: str, key: str, name: str) -> None:
    route = Route("GET", path, {})
    assert (route.key, route.name, route.body) == (key, name, "")


def test_routes_are_those_of_the_server() -> None:
    found = {one.title: one for one in routes(openapi_document())}
    assert found["POST /v1/completions"].body == "CompletionRequest"
    assert {one.path for one in found.values()} > OPEN - {"/", "/docs"}  # which are pages
    assert len({one.name for one in found.values()}) == len(found) > 15


def test_every_error_has_the_status_that_the_server_answers_with() -> None:
    page = errors_page(openapi_document()["components"]["schemas"])
    statuses = {line[9:12] for line in page.splitlines() if line.startswith("   * - ``")}
    assert {"400", "401", "403", "404", "408", "413", "429", "500", "503"} <= statuses
    for text, _ in CAUSES:
        assert text in page


def test_causes_are_told_apart_by_the_server_s_own_table() -> None:
    refused = next(one for _, one in CAUSES if type(one) is ChangeSomething)
    assert api_error(refused).status == 400
