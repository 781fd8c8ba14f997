"""Tools of ``/v1/responses`` that are no functions: left out with one line in the log."""

import logging
from typing import Any, get_args, get_type_hints

import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from openai.types.responses import response_input_item_param, tool_param
from starlette.responses import Response

from kvell.clock import MonotonicClock
from kvell.server.access.visit import RequestContext
from kvell.server.api.http_errors import UnknownModel
from kvell.server.api.routes.responses import ResponsesApi
from kvell.server.api.schemas.responses import ResponsesRequest
from kvell.server.logs.lines import FIELDS, MOST_TOLD

pytestmark = pytest.mark.xdist_group("fake_server")

SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": True}
OTHERS: list[Any] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
    {"type": "namespace", "name": "mcp", "description": "", "tools": [SHELL]},
    {"type": "local_shell"},
    {"type": "image_generation"},
    {"type": "file_search", "vector_store_ids": []},
    {"type": "code_interpreter", "container": "c"},
    {"type": "computer_use_preview"},
    {"type": "mcp", "server_label": "x"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "a_tool_of_next_year", "name": "f g"},
]
ITEMS: list[Any] = [
    {"type": "web_search_call", "id": "w", "status": "completed"},
    {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "z"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
    {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {}, "status": "completed"},
    {"type": "local_shell_call_output", "id": "l", "output": ""},
    {"type": "tool_search_output", "tools": [SHELL]},
    {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
    {"type": "a_tool_of_next_year_call", "content": [1, 2, 3]},
]


def answer(client: openai.OpenAI, **asked: Any) -> Any:
    body: dict[str, Any] = {"model": "fake", "input": "hi", "max_output_tokens": 4}
    return client.responses.create(**body | asked)


def without_ids(reply: Any) -> dict[str, Any]:
    plain: dict[str, Any] = reply.model_dump(exclude={"id", "created_at", "usage"})
    for item in plain["output"]:
        del item["id"]
    return plain


@pytest.mark.parametrize("other", OTHERS, ids=lambda tool: str(tool["type"]))
def test_a_tool_beside_a_function_changes_nothing(client: openai.OpenAI, other: Any) -> None:
    """The answer echoes the tools that it could call."""
    reply = answer(client, tools=[other, SHELL, other], tool_choice="auto")
    assert [tool.to_dict()["name"] for tool in reply.tools] == ["shell"]
    assert without_ids(reply) == without_ids(answer(client, tools=[SHELL], tool_choice="auto"))


def test_allowed_tools_are_those_of_chat(client: openai.OpenAI) -> None:
    """Tools of other types may be allowed; there are none."""
    named = {"type": "function", "name": "shell"}
    choice: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "web_search"}, named],
    }
    tools = [SHELL, SHELL | {"name": "other"}, OTHERS[0]]
    reply = answer(client, tools=tools, tool_choice=choice)
    alone = answer(client, tools=[SHELL], tool_choice="auto")
    assert reply.usage.input_tokens == alone.usage.input_tokens
    assert answer(client, tools=tools).usage.input_tokens > alone.usage.input_tokens


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_without_a_function_there_are_no_tools(client: openai.OpenAI, choice: Any) -> None:
    reply = answer(client, tools=OTHERS, tool_choice=choice)
    assert without_ids(reply) == without_ids(answer(client, tool_choice=choice))


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: str(item["type"]))
def test_items_of_other_tools_are_left_out(client: openai.OpenAI, item: Any) -> None:
    turn = {"role": "user", "content": "hi"}
    reply, bare = answer(client, input=[turn, item, turn]), answer(client, input=[turn, turn])
    assert reply.usage.input_tokens == bare.usage.input_tokens
    assert without_ids(reply) == without_ids(bare)


@pytest.mark.parametrize(
    ("asked", "param", "remedy"),
    [
        ({"tools": OTHERS[:1], "tool_choice": "required"}, "tool_choice", 'use "auto"'),
        ({"tools": [SHELL, OTHERS[0]], "tool_choice": {"type": "web_search"}}, "tool_choice",
         'use "auto"'),
        ({"tools": [SHELL, OTHERS[2]], "tool_choice": {"type": "custom", "name": "apply_patch"}},
         "tool_choice", "force a function"),
        ({"tools": [OTHERS[3]], "tool_choice": {"type": "function", "name": "shell"}},
         "tool_choice.name", "send tools"),
        ({"tools": [SHELL], "tool_choice": {"type": "allowed_tools", "mode": "auto",
          "tools": [{"type": "function", "name": "other"}]}}, "tool_choice.tools[0].name",
         "use one of shell"),
        ({"tools": [SHELL], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
         "tool_choice.mode", 'use "auto"'),
        ({"tools": [OTHERS[0], {"type": "function"}]}, "tools[1].name", "use 1 to 64"),
        ({"tools": [OTHERS[0], SHELL, OTHERS[1], SHELL]}, "tools[3].name", "its own name"),
        ({"tools": [OTHERS[0], {"type": 7}]}, "tools[1].type", 'use "function"'),
        ({"input": ITEMS}, "input", "send a message"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]", "function_call"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]", "'message'"),
    ],
)  # fmt: skip
def test_what_cannot_be_left_out_is_refused(
    client: openai.OpenAI, asked: dict[str, Any], param: str, remedy: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        answer(client, **asked)
    assert caught.value.param == param and remedy in caught.value.message


def types_of(union: Any) -> set[str]:
    hints = [get_type_hints(one)["type"] for one in get_args(union)]
    return {kind for hint in hints for kind in literals(hint)}


def literals(hint: Any) -> set[str]:
    parts = get_args(hint)
    return {one for part in parts for one in ({part} if isinstance(part, str) else literals(part))}


def test_all_types_of_the_client_are_served_or_left_out() -> None:
    """But for those that stand for a conversation that is elsewhere, or change how it goes on."""
    tools = types_of(tool_param.ToolParam)
    sent = ResponsesRequest(input="hi", tools=[{"type": kind} for kind in tools])
    assert {"web_search", "namespace"} <= sent.left_out_tools() == tools - {"function"}
    items = types_of(response_input_item_param.ResponseInputItemParam)
    served = {"message", "function_call", "function_call_output", "reasoning"}
    refused = {"item_reference", "compaction", "compaction_trigger", "configuration_update"}
    others = items - served - refused
    sent = ResponsesRequest.model_validate({"input": [{"type": kind} for kind in others]})
    assert {"web_search_call", "custom_tool_call"} <= sent.left_out_items() == others


def test_each_type_is_told_once_and_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    class NoModels:
        def note(self, body: object) -> None:
            pass

        def find_model(self, name: object, tenant: str) -> None:
            raise UnknownModel("none")

    serving: Any = NoModels()
    app = FastAPI()
    ResponsesApi(serving).install(app)

    @app.middleware("http")
    async def visiting(request: Request, call_next: Any) -> Response:
        request.state.visit = RequestContext("POST", "/v1/responses", "", None, MonotonicClock())
        answered: Response = await call_next(request)
        return answered

    def post(**asked: Any) -> None:
        with pytest.raises(UnknownModel):
            visitor.post("/v1/responses", json={"input": "hi", **asked})

    with TestClient(app) as visitor, caplog.at_level(logging.INFO, "kvell"):
        for _ in range(3):
            post(tools=[*OTHERS[:2], SHELL], input=[{"content": "hi", "role": "user"}, ITEMS[0]])
        told = [(one.getMessage(), getattr(one, FIELDS)["type"]) for one in caplog.records]
        assert sorted(told) == [
            ("item_left_out", "web_search_call"),
            ("tool_left_out", "web_search"),
            ("tool_left_out", "web_search_preview"),
        ]
        for number in range(4):
            names = [f"{number}-{place}" + "x" * 1000 for place in range(100)]
            items = [{"type": f"{name}_call"} for name in names]
            post(
                tools=[{"type": name} for name in names],
                input=[{"content": "hi", "role": "user"}, *items],
            )
    assert len(caplog.records) == 2 * MOST_TOLD
    assert all(len(str(getattr(one, FIELDS))) < 200 for one in caplog.records)
