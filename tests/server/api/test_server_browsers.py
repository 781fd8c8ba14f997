"""Browsers, proxies and probes: other origins, HEAD, a path of a proxy's, names of models."""

import asyncio
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvell.errors import ChangeSomething
from kvell.front.front import Front
from kvell.server.access.accounts import ApiKey
from kvell.server.access.keys import KeyRing, digest_of, operator_key
from kvell.server.api.door.access_guard import Access
from kvell.server.api.door.face_options import (
    CrossOrigin,
    FaceOptions,
    checked_origins,
    checked_root_path,
    parse_list,
)
from kvell.server.api.openai_api import build_app
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.testing.instance import ByteText

PAGE = "https://chat.example"
INSTANCE = [sys.executable, str(Path(__file__).parents[2] / "fleet" / "fake_instance.py")]
INSTANCE += ["--socket-fd", "{socket_fd}", "--incarnation", "{incarnation}"]
KEYS = (operator_key("root"), ApiKey("plain", digest_of(b"plain")))
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}

Ask = Callable[..., None]


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[asyncio.Runner, Front]]:
    """A loop, and a front in it with its instance, for the apps of all tests."""
    with asyncio.Runner() as runner:
        front = Front(INSTANCE, observer=ServerMetrics("fake"))
        runner.run(front.start())
        yield runner, front
        runner.run(front.close())


@pytest.fixture
def asked(started: tuple[asyncio.Runner, Front]) -> Ask:
    runner, front = started

    async def run(
        scenario: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]],
        face: FaceOptions,
        keys: tuple[ApiKey, ...] = (),
        name: str = "fake",
    ) -> None:
        access = Access(KeyRing(keys, 1.0))
        app = build_app(front, ByteText(name), ServerMetrics(name), access=access, face=face)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await scenario(client)

    return lambda *given, **more: runner.run(run(*given, **more))


def with_key(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


def test_a_page_of_an_allowed_origin_asks_with_its_key(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        before = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert before.status_code == 200, "a preflight has no key"
        assert before.headers["access-control-allow-origin"] == PAGE
        assert "POST" in before.headers["access-control-allow-methods"]
        for name in ("authorization", "content-type", "x-stainless-lang"):
            assert name in before.headers["access-control-allow-headers"].lower()
        answer = await client.get("/v1/models", headers=with_key("plain", Origin=PAGE))
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "Retry-After" in answer.headers["access-control-expose-headers"]
        refused = await client.get("/v1/models", headers={"Origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE, "scripts can read why"

    asked(scenario, FaceOptions(cross_origin=CrossOrigin((PAGE,))), KEYS)


def test_a_page_of_another_origin_is_not_allowed(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        headers = {**PREFLIGHT, "Origin": "https://other.example"}
        before = await client.options("/v1/chat/completions", headers=headers)
        assert before.status_code == 400
        headers = with_key("plain", Origin="https://other.example")
        answer = await client.get("/v1/models", headers=headers)
        assert answer.status_code == 200, "it has a key"
        assert "access-control-allow-origin" not in answer.headers

    asked(scenario, FaceOptions(cross_origin=CrossOrigin((PAGE,))), KEYS)


def test_methods_headers_and_credentials_are_those_that_are_given(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        before = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert before.status_code == 400
        assert before.text == "Disallowed CORS method, headers"
        headers = {**PREFLIGHT, "Access-Control-Request-Method": "GET"}
        headers["Access-Control-Request-Headers"] = "x-mine"
        before = await client.options("/v1/models", headers=headers)
        assert before.status_code == 200
        assert before.headers["access-control-allow-credentials"] == "true"

    cross_origin = CrossOrigin((PAGE,), ("GET",), ("x-mine",), credentials=True)
    asked(scenario, FaceOptions(cross_origin=cross_origin))


def test_without_origins_browsers_are_told_nothing(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.get("/v1/models", headers=with_key("plain", Origin=PAGE))
        assert answer.status_code == 200
        assert not any(name.startswith("access-control") for name in answer.headers)
        preflight = await client.options("/v1/models", headers=PREFLIGHT | with_key("plain"))
        assert preflight.status_code == 405

    asked(scenario, FaceOptions(), KEYS)


def test_head_is_answered_where_get_is(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for path in ("/", "/health", "/livez", "/readyz", "/ping", "/version", "/metrics"):
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
            if path != "/metrics":  # which changes from one look to the next
                assert head.headers["content-length"] == got.headers["content-length"]
        assert (await client.head("/v1/models")).status_code == 401
        for path in ("/v1/models", "/v1/models/fake", "/load"):
            assert (await client.head(path, headers=with_key("plain"))).status_code == 200
        assert (await client.head("/v1/completions", headers=with_key("root"))).status_code == 405
        assert (await client.head("/nothing", headers=with_key("root"))).status_code == 404

    asked(scenario, FaceOptions(), KEYS)


def test_probes_of_hosts_are_answered_without_a_key(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for answer in (await client.get("/ping"), await client.post("/ping")):
            assert (answer.status_code, answer.json()) == (200, {"status": "serving"})
        refused = await client.delete("/ping")
        assert refused.status_code == 405
        assert {*refused.headers["allow"].split(", ")} >= {"GET", "POST"}
        assert (await client.get("/load")).status_code == 401
        load = await client.get("/load", headers=with_key("plain"))
        assert load.json() == {"server_load": 0}

    asked(scenario, FaceOptions(), KEYS)


def test_a_schema_names_each_operation_once_and_warns_of_nothing(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schema = (await client.get("/openapi.json")).json()
        operations = [one for path in schema["paths"].values() for one in path.values()]
        assert {*schema["paths"]["/ping"]} == {"get", "post"}
        names = [one["operationId"] for one in operations]
        assert len({*names}) == len(names) > 20

    asked(scenario, FaceOptions())


class _Links(HTMLParser):
    """The ids and the links of a page, and the URLs that it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert value is not None or name == "open"
            if name == "id":
                self.ids.add(value or "")
            elif name == "href" and tag == "a":
                self.links.add(value or "")
            elif name in ("href", "src"):
                self.loaded.add(value or "")


def test_the_page_of_the_api_has_every_route_and_loads_nothing(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        page = await client.get("/docs")  # without a key
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "script-src" not in page.headers["content-security-policy"]
        schema = (await client.get("/openapi.json", headers=with_key("plain"))).json()
        for path, methods in schema["paths"].items():
            for method in methods:
                assert f"<code>{method.upper()} {path}</code>" in page.text
        read = _Links()
        read.feed(page.text)
        assert read.ids == {*schema["components"]["schemas"]}
        assert read.links - {f"#{name}" for name in read.ids} == {"openapi.json"}
        assert not read.loaded and "<script" not in page.text

    asked(scenario, FaceOptions(), KEYS)


def test_the_page_of_the_api_may_be_hidden(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for path in ("/docs", "/openapi.json"):
            refused = await client.get(path)
            assert refused.status_code == 404
            message = refused.json()["error"]["message"]
            assert message == f"path={path}: is not served; see /v1/models for what is"

    asked(scenario, FaceOptions(hides_docs=True))


def test_errors_under_a_root_path_have_the_format_of_their_path(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        ollama = await client.post("/llm/api/chat", json={"model": "x"})
        assert (ollama.status_code, [*ollama.json()]) == (404, ["error"])
        assert isinstance(ollama.json()["error"], str)
        anthropic = await client.post("/llm/v1/messages", json={})
        assert (anthropic.status_code, anthropic.json()["type"]) == (400, "error")
        unknown = (await client.get("/llm/v1/model")).json()["error"]["message"]
        assert unknown == "path=/v1/model: is not served; use /v1/models"

    asked(scenario, FaceOptions(root_path="/llm"))


def test_keys_are_needed_below_ollamas_paths_too(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for path in ("/api/tags", "/api/version", "/api/nothing"):
            refused = await client.get(path)
            assert (refused.status_code, [*refused.json()]) == (401, ["error"])
            assert refused.json()["error"].startswith("missing or wrong API key")
        tags = await client.get("/api/tags", headers=with_key("plain"))
        assert [model["name"] for model in tags.json()["models"]] == ["fake:latest"]

    asked(scenario, FaceOptions(), KEYS)


def test_the_load_counts_answers_that_run(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        body = {"prompt": "hi", "max_tokens": 300, "n": 3}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        while (await client.get("/load")).json() != {"server_load": 3}:
            assert not running.done(), "three were never seen at once"
            await asyncio.sleep(0)  # asking never waits: everything is in this process
        assert (await running).status_code == 200

    asked(scenario, FaceOptions())


@pytest.mark.parametrize("prefix", ["/llm", ""])
def test_a_proxy_may_strip_its_path_or_not(asked: Ask, prefix: str) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await client.get(f"{prefix}/health")).status_code == 200
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        answer = await client.get(f"{prefix}/v1/models/fake", headers=with_key("plain"))
        assert (answer.status_code, answer.json()["id"]) == (200, "fake")
        page = await client.get(f"{prefix}/")
        assert page.status_code == 200
        assert '"debug/pages"' in page.text and '"/debug' not in page.text

    asked(scenario, FaceOptions(root_path="/llm/"), KEYS)


@pytest.mark.parametrize("path", ["/cluster", "/debug/memory", "/debug/pages"])
def test_a_proxys_path_opens_nothing(asked: Ask, path: str) -> None:
    """The guard and the router must see the same path."""

    async def scenario(client: httpx.AsyncClient) -> None:
        for prefix in ("", "/llm"):
            assert (await client.get(prefix + path)).status_code == 401
            plain = await client.get(prefix + path, headers=with_key("plain"))
            assert plain.status_code == 403
            operator = await client.get(prefix + path, headers=with_key("root"))
            assert operator.status_code == 200
        twice = await client.get(f"/llm/llm{path}", headers=with_key("plain"))
        assert twice.status_code == 404

    asked(scenario, FaceOptions(root_path="/llm"), KEYS)


def test_the_root_without_its_slash_leads_to_the_page(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.get("/llm", headers={"Host": "proxy.example"})
        assert answer.status_code == 307
        assert answer.headers["location"] == "http://proxy.example/llm/"

    asked(scenario, FaceOptions(root_path="/llm", allowed_hosts=("proxy.example",)))


def test_a_model_has_all_its_names(asked: Ask) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["owner/name", "gpt-4"]
        for path in ("owner/name", "owner%2Fname", "gpt-4"):
            assert (await client.get(f"/v1/models/{path}")).status_code == 200
        for name in ("owner/name", "gpt-4", None):
            body = {"model": name, "prompt": "hi", "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["model"] == (name or "owner/name")
        unknown = await client.post("/v1/completions", json={"model": "other", "prompt": "hi"})
        assert unknown.status_code == 404
        assert "use owner/name, gpt-4" in unknown.json()["error"]["message"]

    asked(scenario, FaceOptions(served_names=("owner/name", "gpt-4")), name="owner/name")


def test_a_tokenizers_settings_are_shown_only_if_asked_for(asked: Ask) -> None:
    async def hidden(client: httpx.AsyncClient) -> None:
        answer = await client.get("/tokenizer_info")
        assert answer.status_code == 404
        assert "--enable-tokenizer-info-endpoint" in answer.json()["error"]["message"]

    async def shown(client: httpx.AsyncClient) -> None:
        answer = await client.get("/tokenizer_info")
        assert answer.json() == {"tokenizer_class": "ByteText"}

    asked(hidden, FaceOptions())
    asked(shown, FaceOptions(tells_tokenizer=True))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], ()),
        (["*"], ("*",)),
        (['["*"]'], ("*",)),
        (['["https://a.b", "http://localhost:3000"]'], ("https://a.b", "http://localhost:3000")),
        (["https://a.b", "null"], ("https://a.b", "null")),
    ],
)
def test_origins_are_given_as_in_vllm_or_one_by_one(
    given: list[str], found: tuple[str, ...]
) -> None:
    assert checked_origins(given) == found


@pytest.mark.parametrize("one", ["a.b", "https://", "https://a.b/", "://a", "[", "[3]", '{"a": 1}'])
def test_what_is_no_origin_is_refused(one: str) -> None:
    with pytest.raises(ChangeSomething) as refused:
        checked_origins([one])
    assert refused.value.field == "allowed_origins"


def test_a_list_names_its_flag() -> None:
    assert parse_list("allowed_methods", ['["GET", "POST"]', "PUT"]) == ("GET", "POST", "PUT")
    with pytest.raises(ChangeSomething, match=r"allowed_headers=\[1\]"):
        parse_list("allowed_headers", ["[1]"])


def test_root_paths() -> None:
    assert [checked_root_path(one) for one in ("", "/", "/llm/", "/a/b")] == [
        "",
        "",
        "/llm",
        "/a/b",
    ]
    for wrong in ("llm", "//evil.example", "https://x"):
        with pytest.raises(ChangeSomething, match="is not a path"):
            checked_root_path(wrong)
