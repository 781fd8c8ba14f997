"""``kv_hints``: which advice is followed, which is named in the log, and which is malformed."""

import logging
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import ChatRequest
from kvell.server.api.schemas.generation import CompletionRequest
from kvell.server.api.schemas.responses import ResponsesRequest
from kvell.server.api.schemas.sampling_fields import MAX_ACTIONS, MAX_DIRECTIVES, KvHints
from kvell.server.logs.lines import FIELDS, LONGEST_NAME, MOST_TOLD, OncePerName
from kvell.server.text.text_bounds import AnswerRoom

pytestmark = pytest.mark.xdist_group("fake_server")

KEPT = {"start": 0, "end": 40, "priority": 80, "duration": 600}
RELEASED = {"priority": 0}

EVENT = "kv_hint_ignored"


def action(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    head = {"action_id": "a", "action_type": kind, "action_version": version}
    return {**head, "payload": payload}


def hints(*actions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions), **fields}


def retain(*directives: Any) -> dict[str, Any]:
    return action("kv.retain", directives=list(directives))


FETCH = action("kv.fetch", source="tcp://elsewhere", block_hashes=[1, 2])


@pytest.mark.parametrize(
    ("actions", "told"),
    [
        ([], None),
        ([retain()], None),
        ([retain(KEPT)], True),
        ([retain(KEPT, {"start": 40, "priority": 0})], True),
        ([retain({"covers_output": True, "priority": 5})], True),
        ([retain(RELEASED)], False),
        ([retain({"start": 0, "end": None, "priority": 0, "duration": None})], False),
        ([retain({"start": 64, "priority": 0})], None),
        ([retain({"end": 64, "priority": 0})], None),
        ([retain({"covers_output": True, "priority": 0})], None),
        ([retain(KEPT), retain(RELEASED)], False),
        ([retain(RELEASED), FETCH, retain(KEPT)], True),
        ([FETCH], None),
        ([action("kv.retain", "2.0", anything="else")], None),
        ([action("kv.retain", "1.7", scope="agent", directives=[KEPT])], True),
    ],
)
def test_what_is_protected_will_return(actions: list[dict[str, Any]], told: bool | None) -> None:
    given = hints(*actions)
    assert KvHints.model_validate(given).will_return() is told
    completion = CompletionRequest(prompt="a", kv_hints=given)  # type: ignore[arg-type]
    chat = {"messages": [{"role": "user", "content": "a"}], "kv_hints": given}
    room = AnswerRoom(99, 99)
    responses = ResponsesRequest.model_validate({"input": "a", "kv_hints": given})
    for body in (completion, ChatRequest.model_validate(chat), responses.chat()):
        assert body.sampling(room).will_return is told
    for own in (True, False):
        both = ChatRequest.model_validate(chat | {"will_return": own})
        assert both.sampling(room).will_return is own, "what the request says itself goes first"


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ({}, "directives"),
        ({"directives": {}}, "directives"),
        ({"directives": [RELEASED] * (MAX_DIRECTIVES + 1)}, "directives"),
        ({"directives": [], "scope": 5}, "scope"),
        ({"directives": [5]}, "directives[0]"),
        ({"directives": [KEPT, {}]}, "directives[1].priority"),
        ({"directives": [{"priority": 101}]}, "directives[0].priority"),
        ({"directives": [{"priority": -1}]}, "directives[0].priority"),
        ({"directives": [{"priority": True}]}, "directives[0].priority"),
        ({"directives": [{"priority": 1, "start": -1}]}, "directives[0].start"),
        ({"directives": [{"priority": 1, "start": None}]}, "directives[0].start"),
        ({"directives": [{"priority": 1, "start": 5, "end": 5}]}, "directives[0].end"),
        ({"directives": [{"priority": 1, "end": "x"}]}, "directives[0].end"),
        ({"directives": [{"priority": 1, "duration": -1}]}, "directives[0].duration"),
        ({"directives": [{"priority": 1, "duration": True}]}, "directives[0].duration"),
        ({"directives": [{"priority": 1, "covers_output": 1}]}, "directives[0].covers_output"),
        (
            {"directives": [{"priority": 1, "covers_output": True, "end": 5}]},
            "directives[0].covers_output",
        ),
        ({"directives": [{"priority": 1, "colour": 1}]}, "directives[0].colour"),
    ],
)
def test_what_is_malformed_is_refused_by_name(
    server_url: str, payload: dict[str, Any], place: str
) -> None:
    given = hints(FETCH, {**action("kv.retain"), "payload": payload})
    with pytest.raises(ChangeSomething) as caught:
        KvHints.model_validate(given).will_return()
    assert caught.value.field == f"kv_hints.actions[1].payload.{place}"
    for path, body in (
        ("completions", {"prompt": "hi"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("responses", {"input": "hi"}),
    ):
        reply = httpx.post(f"{server_url}/v1/{path}", json={**body, "kv_hints": given})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, caught.value.field)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (hints(protocol_version="0.2"), ".protocol_version"),
        (hints(message_id=""), ".message_id"),
        (hints(message_id=None), ".message_id"),
        (hints(*[FETCH] * (MAX_ACTIONS + 1)), ".actions"),
        (hints({**FETCH, "action_type": ""}), ".actions[0].action_type"),
        (hints({**FETCH, "action_type": "x" * 257}), ".actions[0].action_type"),
        (hints({**FETCH, "payload": []}), ".actions[0].payload"),
        (
            hints({key: value for key, value in FETCH.items() if key != "action_id"}),
            ".actions[0].action_id",
        ),
        ({"message_id": "m", "actions": []}, ".protocol_version"),
        ([FETCH], ""),
    ],
)
def test_an_envelope_that_is_none_is_refused(server_url: str, given: Any, place: str) -> None:
    with pytest.raises(ValidationError):
        KvHints.model_validate(given)
    reply = httpx.post(
        f"{server_url}/v1/completions", json={"prompt": "hi", "max_tokens": 1, "kv_hints": given}
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, f"kv_hints{place}")


def test_advice_changes_no_answer(server_url: str) -> None:
    body = {"prompt": "advised", "max_tokens": 5}
    plain = httpx.post(f"{server_url}/v1/completions", json=body).json()
    for given in (hints(FETCH, retain(KEPT)), hints(), None):
        told = httpx.post(f"{server_url}/v1/completions", json={**body, "kv_hints": given})
        assert told.json()["choices"] == plain["choices"]


def test_kinds_that_are_not_followed_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    given = KvHints.model_validate(
        hints(FETCH, retain(KEPT), FETCH, action("kv.retain", "2.0"), action("x" * 200))
    )
    told = OncePerName(EVENT, "action")
    with caplog.at_level(logging.INFO, logger="kvell"):
        for _ in range(3):
            told.note(given.find_ignored())
        kinds = [getattr(one, FIELDS)["action"] for one in caplog.records if one.msg == EVENT]
        assert kinds == ["kv.fetch@1.0", "kv.retain@2.0", "x" * LONGEST_NAME]
        told.note(f"kind-{number}" for number in range(1000))
    assert len([one for one in caplog.records if one.msg == EVENT]) == MOST_TOLD


def test_a_server_names_what_it_does_not_follow(tmp_path: Any) -> None:
    from tests.server.keyed import keyed_server

    with keyed_server(tmp_path) as keyed:
        for _ in range(2):
            assert keyed.post("red-1", prompt="x", kv_hints=hints(FETCH)).status_code == 200
        assert keyed.line(EVENT)["action"] == "kv.fetch@1.0"
        assert keyed.post("red-1", prompt="x", kv_hints=hints(action("kv.move"))).status_code == 200
        assert keyed.line(EVENT)["action"] == "kv.move@1.0", "the first was named once"
