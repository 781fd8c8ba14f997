"""The door: which key opens which path, limits of a key, and what is told of a visit."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from kvell.clock import VirtualClock
from kvell.server.access.accounts import ApiKey
from kvell.server.access.keys import KeyRing, digest_of, operator_key
from kvell.server.access.traced_visit import EndedVisit
from kvell.server.api.door.access_guard import Access, AccessGuard, visit_of
from kvell.server.logs.visits import VisitLines

KEYS = (
    operator_key("root"),
    ApiKey("plain", digest_of(b"plain")),
    ApiKey("small", digest_of(b"small"), requests_per_minute=2, tokens_per_minute=100),
)
ANSWERS = ("/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/nothing", "/openapi.json")
OPERATORS = (
    *("/cluster", "/cluster/scale", "/debug/memory", "/debug/audit", "/reset_prefix_cache"),
)
OPEN = ("/", "/health", "/version", "/metrics")


class Notes(VisitLines):
    """Lines of visits that are kept."""

    def __init__(self) -> None:
        super().__init__(tells_requests=False)
        self.refusals: list[tuple[str, str, str, int, str]] = []
        self.ends: list[EndedVisit] = []

    def on_refused(
        self, method: str, path: str, client: str, status: int, tenant: str, header: str = ""
    ) -> None:
        self.refusals.append((method, path, client, status, tenant))

    def on_ended(self, visit: EndedVisit) -> None:
        self.ends.append(visit)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says whose visit it is; a body of two numbers reserves tokens."""
    request = Request(scope, receive)
    body, visit = await request.body(), visit_of(request)
    if body == b"break":
        raise ValueError("a bug")
    if body:
        prompt, output = json.loads(body)
        visit.begin("id", "m", prompt, output)
    await JSONResponse({"tenant": visit.tenant, "salt": visit.salt("s")})(scope, receive, send)


async def unused() -> Message:
    raise AssertionError("nothing is to be read")


async def unsent(_message: Message) -> None:
    raise AssertionError("nothing is to be sent")


class Door:
    """A guarded app, and a client of it."""

    def __init__(self, keys: tuple[ApiKey, ...] = KEYS, *, guards_metrics: bool = False) -> None:
        self.clock, self.notes = VirtualClock(100.0), Notes()
        self.ring = KeyRing(keys, self.clock.now_seconds())
        access = Access(self.ring, guards_metrics, self.notes, self.clock)
        self.guarded = AccessGuard(app, access)

    def ask(
        self, path: str, key: str | None = None, method: str = "POST", content: bytes = b""
    ) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.send(path, headers, method, content)

    def send(
        self, path: str, headers: dict[str, str], method: str = "POST", content: bytes = b""
    ) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.guarded, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await client.request(method, path, headers=headers, content=content)

        return asyncio.run(asked())


@pytest.fixture
def door() -> Iterator[Door]:
    yield Door()


@pytest.mark.parametrize("path", ANSWERS + OPERATORS)
@pytest.mark.parametrize("key", [None, "", "wrong", "Plain", "plainx", "plai"])
def test_a_missing_or_wrong_key_is_401(door: Door, path: str, key: str | None) -> None:
    reply = door.ask(path, key)
    assert reply.status_code == 401
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer plain", 200),
        ("bearer plain", 200),
        ("BEARER plain", 200),
        ("Bearer  plain", 401),
        ("Bearer", 401),
        ("plain", 401),
        ("Basic plain", 401),
        ("", 401),
    ],
)
def test_only_the_whole_key_with_its_scheme_opens(door: Door, header: str, status: int) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", header.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": headers}
    asyncio.run(door.guarded(scope, receive, send))
    assert sent[0]["status"] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "plain"}, 200),
        ({"X-API-KEY": "plain", "authorization": "Bearer wrong"}, 200),
        ({"x-api-key": "wrong", "authorization": "Bearer plain"}, 200),
        ({"x-api-key": "Bearer plain"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "wrong", "authorization": "Basic plain"}, 401),
    ],
)
def test_a_key_may_come_as_anthropics_clients_send_it(
    door: Door, headers: dict[str, str], status: int
) -> None:
    reply = door.send("/v1/messages", headers)
    assert reply.status_code == status
    if status == 401:
        told = reply.json()
        assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")


def test_limits_of_anthropics_paths_are_told_in_anthropics_shape(door: Door) -> None:
    replies = [door.send("/v1/messages", {"x-api-key": "small"}) for _ in range(3)]
    assert [one.status_code for one in replies] == [200, 200, 429]
    error = replies[-1].json()["error"]
    assert error["type"] == "rate_limit_error" and set(error) == {"type", "message"}
    assert "retry-after" in replies[-1].headers


@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize("key", ["root", "plain", "small"])
def test_every_key_opens_what_answers(door: Door, path: str, key: str) -> None:
    assert door.ask(path, key).status_code == 200


@pytest.mark.parametrize("path", OPERATORS)
@pytest.mark.parametrize(("key", "status"), [("root", 200), ("plain", 403), ("small", 403)])
def test_only_operators_see_and_change_the_server(
    door: Door, path: str, key: str, status: int
) -> None:
    reply = door.ask(path, key)
    assert reply.status_code == status
    if status == 403:
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "insufficient_permissions"


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("key", [None, "wrong", "plain"])
def test_what_tells_little_is_open(door: Door, path: str, key: str | None) -> None:
    assert door.ask(path, key, "GET").status_code == 200


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("plain", 403), ("root", 200)])
def test_metrics_can_be_guarded(key: str | None, status: int) -> None:
    door = Door(guards_metrics=True)
    assert door.ask("/metrics", key, "GET").status_code == status
    assert door.ask("/health", key, "GET").status_code == 200


@pytest.mark.parametrize("path", ANSWERS + OPERATORS + OPEN)
def test_without_keys_everybody_does_everything_as_nobody(path: str) -> None:
    reply = Door((), guards_metrics=True).ask(path)
    assert reply.status_code == 200
    assert reply.json() == {"tenant": "", "salt": "s"}


def test_handlers_know_the_tenant(door: Door) -> None:
    assert door.ask("/v1/x", "plain").json() == {"tenant": "plain", "salt": "5:plains"}
    assert door.ask("/v1/x", "small").json() == {"tenant": "small", "salt": "5:smalls"}


def test_too_many_requests_are_429_and_say_when_to_come_back(door: Door) -> None:
    for left, reset in (("1", "30s"), ("0", "1m0s")):
        reply = door.ask("/v1/x", "small")
        assert reply.status_code == 200
        assert reply.headers["x-ratelimit-limit-requests"] == "2"
        assert reply.headers["x-ratelimit-remaining-requests"] == left
        assert reply.headers["x-ratelimit-reset-requests"] == reset
    reply = door.ask("/v1/x", "small")
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "30"
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert reply.headers["x-ratelimit-reset-requests"] == "1m0s"
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert door.ask("/v1/x", "plain").status_code == 200
    door.clock.advance(29.0)
    assert door.ask("/v1/x", "small").headers["retry-after"] == "1"
    door.clock.advance(1.0)
    assert door.ask("/v1/x", "small").status_code == 200


def test_reading_what_there_is_counts_as_no_request(door: Door) -> None:
    for _ in range(5):
        reply = door.ask("/v1/models", "small", "GET")
        assert reply.headers["x-ratelimit-remaining-requests"] == "2"


def test_tokens_are_settled_when_the_answer_has_ended(door: Door) -> None:
    reply = door.ask("/v1/x", "small", content=b"[30, 60]")
    assert reply.headers["x-ratelimit-limit-tokens"] == "100"
    assert reply.headers["x-ratelimit-remaining-tokens"] == "10"
    assert door.ask("/v1/models", "small", "GET").headers["x-ratelimit-remaining-tokens"] == "70"


def test_too_many_tokens_are_429(door: Door) -> None:
    assert door.ask("/v1/x", "small", content=b"[100, 0]").status_code == 200
    reply = door.ask("/v1/x", "small", content=b"[10, 10]")
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "12")
    assert reply.headers["x-ratelimit-remaining-tokens"] == "0"
    assert reply.headers["x-ratelimit-reset-tokens"] == "1m0s"
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")


def test_keys_without_limits_get_no_headers_of_limits(door: Door) -> None:
    for reply in (door.ask("/v1/x", "plain"), door.ask("/health")):
        assert not [name for name in reply.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("sent", ["abc-1", "", "two words", "tab\there", "x" * 129])
def test_an_answer_and_the_log_name_the_request(door: Door, sent: str) -> None:
    headers = {"Authorization": "Bearer plain", "x-request-id": sent}
    reply = door.send("/v1/x", headers, content=b"[1, 2]")
    named = reply.headers["x-request-id"]
    assert (named == sent) == (sent == "abc-1") and len(named) > 4
    assert [one.request_id for one in door.notes.ends] == [named]


def test_refused_keys_are_told_without_the_key(door: Door) -> None:
    door.ask("/v1/x", "wrong-secret")
    door.ask("/cluster", "plain")
    assert door.notes.refusals == [
        ("POST", "/v1/x", "127.0.0.1", 401, ""),
        ("POST", "/cluster", "127.0.0.1", 403, "plain"),
    ]
    assert door.notes.ends == []
    assert "wrong-secret" not in repr(vars(door.notes))


def test_every_end_is_told_once(door: Door) -> None:
    door.ask("/v1/x", "small", content=b"[10, 20]")
    door.ask("/v1/models", "root", "GET")
    door.ask("/v1/x", "small", content=b"break")
    door.ask("/v1/x", "small")
    told = [(one.tenant, one.status, one.answer_id, one.prompt_tokens) for one in door.notes.ends]
    assert told == [
        ("small", 200, "id", 10),
        ("operator", 200, "", 0),
        ("small", 500, "", 0),
        ("small", 429, "", 0),
    ]


def test_a_client_that_leaves_is_told_as_such() -> None:
    notes = Notes()

    async def half(scope: Scope, _receive: Receive, send: Send) -> None:
        visit_of(Request(scope)).begin("id", "m", 5, 10)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def send(_message: Message) -> None:
        return None

    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": []}
    asyncio.run(AccessGuard(half, Access(observer=notes))(scope, unused, send))
    assert [(one.status, one.prompt_tokens) for one in notes.ends] == [(499, 5)]


async def test_a_request_that_is_cut_off_is_settled_too() -> None:
    door = Door()
    account = door.ring.find(b"small")
    assert account is not None

    async def runs_on(scope: Scope, _receive: Receive, _send: Send) -> None:
        visit_of(Request(scope)).begin("id", "m", 5, 10)
        await asyncio.Event().wait()

    access = Access(door.ring, observer=door.notes, clock=door.clock)
    headers = [(b"authorization", b"Bearer small")]
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": headers}
    guarded = AccessGuard(runs_on, access)
    answering = asyncio.ensure_future(guarded(scope, unused, unsent))
    await asyncio.sleep(0)  # it runs until it waits
    assert account.headers(100.0)["x-ratelimit-remaining-tokens"] == "85"
    answering.cancel()
    await asyncio.wait([answering])
    assert account.headers(100.0)["x-ratelimit-remaining-tokens"] == "95"
    assert [one.status for one in door.notes.ends] == [499]


def test_keys_can_be_replaced_while_it_serves(door: Door) -> None:
    door.ring.replace([ApiKey("new", digest_of(b"fresh"))], 100.0)
    assert door.ask("/v1/x", "plain").status_code == 401
    assert door.ask("/v1/x", "fresh").json()["tenant"] == "new"
