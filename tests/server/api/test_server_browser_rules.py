"""Requests of web pages to a server without keys: names, origins, and what other programs send."""

import asyncio
from collections.abc import Iterable

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from kvell.errors import ChangeSomething
from kvell.server.access.keys import KeyRing, operator_key
from kvell.server.api.door.access_guard import Access, AccessGuard, BrowserRules
from kvell.server.api.door.face_options import checked_hosts

Headers = Iterable[tuple[str, str]]
OWN = "127.0.0.1:8000"
EVIL = "https://evil.example"
CROSS = ("Sec-Fetch-Site", "cross-site")
LINK = (CROSS, ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document"))


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def refused(
    headers: Headers,
    method: str = "POST",
    path: str = "/cluster/scale",
    rules: BrowserRules = BrowserRules(),  # noqa: B008 - it is frozen
) -> dict[str, str] | None:
    """Return the error of a request to a server without keys; None if it is passed on."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(AccessGuard(app, Access(), browsers=rules)(scope, receive, send))
    if sent[0]["status"] == 200:
        return None
    assert sent[0]["status"] == 403
    response = httpx.Response(403, content=sent[1]["body"])
    error: dict[str, str] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST:1", "localhost.", "localhost.:8000"),
        *("kvell", "my-container:8000", "x", "Server_2"),
        *("127.0.0.1", "127.0.0.1:8000", "192.168.1.7:80", "[::1]", "[::1]:8000", "[FE80::1]"),
        *("kvell.lan", "Kvell.LAN.:8000", "a.team.example", "b.a.team.example:1", ""),
    ],
)
def test_a_name_that_no_stranger_can_point_here_is_served(host: str) -> None:
    rules = BrowserRules(hosts=("Kvell.lan", "*.team.example"))
    assert refused([("Host", host)], rules=rules) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io"),
        *("evil.localhost", "127.1", "2130706433", "[::1", "[::1]x", "[]", "127.0.0.1:8000:1"),
        *("notkvell.lan", "kvell.lan.evil.example", "team.example", "ateam.example", "[evil]"),
        *("localhost evil", "localhost@evil.example", "localhost:evil.example", "localhost,x"),
    ],
)
def test_another_name_is_refused_with_the_flag_that_allows_it(host: str) -> None:
    rules = BrowserRules(hosts=("kvell.lan", "*.team.example"))
    for method, path in (("POST", "/v1/completions"), ("GET", "/debug/pages"), ("GET", "/")):
        error = refused([("Host", host)], method, path, rules)
        assert error is not None and error["param"] == "host"
        assert "--allowed-hosts" in error["message"] and "--api-key" in error["message"]
    assert refused([("Host", host)], rules=BrowserRules(hosts=("*",))) is None


def test_two_hosts_are_none() -> None:
    assert refused([("Host", "evil.example"), ("Host", OWN)])
    assert refused([("Host", OWN), ("Host", "localhost")])


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE"])
@pytest.mark.parametrize(
    "page",
    [
        *(EVIL, "null", "http://localhost:3000", "http://127.0.0.1", "https://127.0.0.1:8001"),
        *("http://127.0.0.1:8000.evil.example", "http://evil.example/127.0.0.1:8000", "x", "://"),
        *("file://", "chrome-extension://abc", "http://127.0.0.1:8000@evil.example:8000"),
    ],
)
def test_a_page_of_another_origin_is_refused_with_the_flag_that_allows_it(
    page: str, method: str
) -> None:
    headers = [("Host", OWN), ("Origin", page)]
    error = refused(headers, method)
    assert error is not None and error["param"] == "origin"
    assert f"--allowed-origins {page}," in error["message"]
    for allowed in ((page,), ("*",)):
        assert refused([*headers, CROSS], method, rules=BrowserRules(origins=allowed)) is None


@pytest.mark.parametrize(
    ("page", "host"),
    [
        ("http://127.0.0.1:8000", OWN),
        ("http://localhost", "localhost"),
        ("http://localhost", "LOCALHOST:80"),
        ("https://localhost", "localhost"),
        ("https://localhost", "localhost:443"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_the_servers_own_page_is_served(page: str, host: str) -> None:
    own = [("Host", host), ("Origin", page), ("Sec-Fetch-Site", "same-origin")]
    for method in ("GET", "POST"):
        assert refused(own, method) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site", "other"])
def test_a_foreign_page_without_an_origin_is_refused_too(site: str) -> None:
    headers = [("Host", OWN), ("Sec-Fetch-Site", site), ("Sec-Fetch-Mode", "no-cors")]
    for method, path in (("GET", "/debug/audit"), ("GET", "/"), ("POST", "/reset_prefix_cache")):
        error = refused(headers, method, path)
        assert error is not None and error["param"] == "sec-fetch-site"
        assert "--allowed-origins" in error["message"]
    assert refused(headers, rules=BrowserRules(origins=("*",))) is None
    assert refused(headers, rules=BrowserRules(origins=(EVIL,))), "nothing says which page it is"


def test_a_link_leads_to_pages_only() -> None:
    link = [("Host", OWN), *LINK]
    assert refused(link, "GET", "/") is None
    assert refused(link, "GET", "/docs") is None
    assert refused(link, "GET", "/debug/pages")
    assert refused(link, "POST", "/")
    framed = [("Host", OWN), *LINK[:2], ("Sec-Fetch-Dest", "iframe")]
    assert refused(framed, "GET", "/")


def test_programs_that_are_no_browsers_are_served_as_before() -> None:
    for headers in ([], [("Host", OWN)], [("Host", OWN), ("Sec-Fetch-Site", "none")]):
        for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("HEAD", "/livez")):
            assert refused(headers, method, path) is None


def test_with_keys_pages_and_names_are_not_looked_at() -> None:
    ring = KeyRing((operator_key("root"),), 0.0)
    guard = AccessGuard(app, Access(ring))

    async def status(**headers: str) -> int:
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as client:
            headers = {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", **headers}
            return (await client.post("/cluster/scale", headers=headers)).status_code

    assert asyncio.run(status()) == 401
    assert asyncio.run(status(Authorization="Bearer root")) == 200


def test_names_are_given_as_in_vllm_or_one_by_one() -> None:
    assert checked_hosts(['["kvell.lan", "*.example"]', "*"]) == ("kvell.lan", "*.example", "*")


@pytest.mark.parametrize(
    "name", ["http://kvell.lan", "kvell.lan:8000", "kvell.lan/", "*x.example", "a b", "", "[::1"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ChangeSomething) as error:
        checked_hosts([name])
    assert error.value.field == "allowed_hosts"
