"""``kvell bench serve`` against a small server on a real socket: counts and order, not times."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kvell.cli.main import root
from kvell.engine.protocol.messages import Finished
from kvell.front.request_log import EndedRequest
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.vocabulary import RequestId

Kvell = Callable[..., Any]
KEY = "secret"


@dataclass
class App:
    """An ASGI app that streams the requested number of words and keeps the requests."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    wants_key: bool = False
    metrics: ServerMetrics | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        headers = dict(scope["headers"])
        if self.wants_key and headers.get(b"authorization") != f"Bearer {KEY}".encode():
            await answer(send, 401, {"error": {"message": "who are you"}})
        elif scope["path"] == "/v1/models":
            await answer(send, 200, {"data": [{"id": "tiny"}]})
        elif scope["method"] == "POST":
            await self._stream(json.loads(await whole_body(receive)), receive, send)
        elif scope["path"] == "/metrics" and self.metrics is not None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": self.metrics.render()})
        else:
            await answer(send, 404, {"detail": "Not Found"})

    def _measure(self, tokens: int) -> None:
        if self.metrics is not None:
            end = Finished(
                RequestId("r"),
                0,
                "length",
                5,
                tokens,
                queue_seconds=0.5,
                prefill_seconds=0.25,
                decode_seconds=1.5,
            )
            self.metrics.first_tokens(0.75, tokens, 5)
            self.metrics.on_ended(EndedRequest(end, 2.25, 0.0, tokens, tokens))

    async def _stream(self, body: dict[str, Any], receive: Any, send: Any) -> None:
        self.bodies.append(body)
        if body.get("top_k") == 99:
            await answer(send, 400, {"error": {"message": "top_k is not served"}})
            return
        head = {"type": "http.response.start", "status": 200}
        await send(head | {"headers": [(b"content-type", b"text/event-stream")]})
        for index in range(body["max_tokens"]):
            text = f" w{index}"
            choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
            await send_event(send, {"choices": [choice]})
        self._measure(body["max_tokens"])
        usage = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}
        await send_event(send, {"choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def whole_body(receive: Any) -> bytes:
    found = b""
    while True:
        message = await receive()
        found += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return found


async def answer(send: Any, status: int, payload: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(payload).encode()})


async def send_event(send: Any, payload: Any) -> None:
    body = b"data: " + json.dumps(payload).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def url(app: App) -> Iterator[str]:
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_keep_alive=60)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    server.force_exit = True
    thread.join()


@pytest.fixture
def bench(kvell: Kvell, url: str) -> Callable[..., Any]:
    def call(*flags: str | Path) -> Any:
        return kvell("bench", "serve", "--base-url", url, "--rate", "inf", *flags)

    return call


LENGTHS = ("--prompt-tokens", "6", "--output-tokens", "4", "--num-requests", "5")


class TestOtherSide:
    """The server's own figures, beside those of its clients."""

    def test_json(self, bench: Any, app: App) -> None:
        app.metrics = ServerMetrics("tiny")
        app.metrics.first_tokens(100.0, 1, 5)  # before the run: none of its business
        ended = bench(*LENGTHS, "--json")
        assert ended.code == 0, ended.stderr
        server = json.loads(ended.stdout)["server"]
        means = {name: server[f"{name}_seconds"]["mean"] for name in ("ttft", "e2e", "queue")}
        assert means == {"ttft": 0.75, "e2e": 2.25, "queue": 0.5}
        assert server["tpot_seconds"]["mean"] == 0.5
        assert (server["prompt_tokens"], server["output_tokens"]) == (25, 20)

    def test_table(self, bench: Any, app: App) -> None:
        app.metrics = ServerMetrics("tiny")
        ended = bench(*LENGTHS)
        assert ended.code == 0, ended.stderr
        [line] = [one for one in ended.stdout.splitlines() if "in its queue" in one]
        assert "500.0" in line
        assert "to the first token (server)" in ended.stdout
        assert "output tokens (server)" in ended.stdout


class TestRun:
    def test_json_has_the_names_of_the_contract(self, bench: Any, app: App) -> None:
        ended = bench(*LENGTHS, "--slo-ttft", "60", "--slo-tpot", "60", "--json")
        assert ended.code == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert (found["model"], found["completed"], found["failed"]) == ("tiny", 5, 0)
        assert found["output_tokens"] == 20
        for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
            assert list(found[name]) == ["mean", "p50", "p90", "p99"]
            assert 0 <= found[name]["p50"] <= found[name]["p99"]
        assert found["goodput"] == found["request_rate"] > 0
        assert found["output_tokens_per_second"] == pytest.approx(4 * found["request_rate"])
        assert [len(body["prompt"]) for body in app.bodies] == [6] * 5
        assert found["server"] == {}

    def test_a_table_a_file_and_a_picture(self, bench: Any, tmp_path: Path) -> None:
        path, picture = tmp_path / "r.json", tmp_path / "r.html"
        ended = bench(*LENGTHS, "--json", path, "--plot", picture)
        assert ended.code == 0, ended.stderr
        words = " ".join(ended.stdout.split())
        assert "tiny, 6 in, 4 out" in words
        assert "completed 5" in words
        assert "sent late by the generator" in words
        assert "no objective given" in words
        assert json.loads(path.read_text())["rate"] == "inf"
        assert "<svg" in picture.read_text()

    def test_the_same_seed_sends_the_same(self, bench: Any, app: App) -> None:
        for seed in ("1", "1", "2"):
            bench(*LENGTHS, "--seed", seed)
        prompts = [
            json.dumps(sorted(b["prompt"] for b in app.bodies[i : i + 5])) for i in (0, 5, 10)
        ]
        assert prompts[0] == prompts[1] != prompts[2]

    def test_a_session_says_again_what_it_heard(self, bench: Any, app: App) -> None:
        ended = bench("--workload", "react-like", "--num-requests", "2", "--json")
        assert json.loads(ended.stdout)["completed"] == 2
        first, second = (body["prompt"] for body in app.bodies)
        heard = "".join(f" w{index}" for index in range(app.bodies[0]["max_tokens"]))
        assert second.startswith(first + heard + " ")

    def test_chat(self, bench: Any, app: App) -> None:
        ended = bench(*LENGTHS, "--endpoint", "chat", "--no-ignore-eos", "--json")
        assert json.loads(ended.stdout)["completed"] == 5
        assert {len(body["messages"]) for body in app.bodies} == {1}
        assert "ignore_eos" not in app.bodies[0]

    def test_clients_that_hang_up(self, bench: Any) -> None:
        many = ("--prompt-tokens", "4", "--output-tokens", "400", "--num-requests", "6")
        ended = bench(*many, "--disconnect-share", "1", "--json")
        found = json.loads(ended.stdout)
        assert found["completed"] + found["disconnected"] == 6
        assert (found["disconnected"] > 0, found["failed"]) == (True, 0)

    def test_a_key_and_further_fields(self, bench: Any, app: App) -> None:
        app.wants_key = True
        ended = bench(*LENGTHS, "--api-key", KEY, "--extra-body", '{"top_k": 3}', "--json")
        assert json.loads(ended.stdout)["completed"] == 5
        assert app.bodies[0]["top_k"] == 3
        assert "return_token_ids" not in app.bodies[0]

    def test_ids_of_answers_may_be_asked_for(self, bench: Any, app: App) -> None:
        session = ("--workload", "react-like", "--num-requests", "2")
        bench(*session, "--return-token-ids", "--vocab-size", "500")
        assert app.bodies[0]["return_token_ids"] is True
        assert max(app.bodies[0]["prompt"]) < 500


class TestErrors:
    @pytest.mark.parametrize(
        ("flags", "line"),
        [
            (("--model", "huge"), "--model=huge: is not served at .*; use tiny"),
            (("--extra-body", '{"top_k": 99}'), "--model=tiny: the server refuses the first"),
            (("--extra-body", "[1]"), "--extra-body=[1]: is not a JSON object"),
            (("--extra-body", "{"), "--extra-body={: is not a JSON object"),
            (("--base-url", "nowhere"), "--base-url=nowhere: is not an address of a server"),
            (("--plot", "x.gif"), "--plot=x.gif: ends in none of"),
            (("--plot", "/nope/x.png"), "--plot=/nope/x.png: is in no directory"),
            (("--rate", "0"), "--rate"),
            (("--disconnect-share", "2"), "--disconnect-share"),
            (("--num-requests", "0"), "--num-requests"),
        ],
    )
    def test_one_line_and_code_2(self, bench: Any, flags: Any, line: str) -> None:
        ended = bench(*LENGTHS, *flags)
        assert (ended.code, ended.stdout) == (2, "")
        [said] = [one for one in ended.stderr.splitlines() if not one.endswith("…")]
        assert all(part in said for part in line.split(".*"))

    def test_nobody_there(self, kvell: Kvell) -> None:
        ended = kvell("bench", "serve", *LENGTHS, "--base-url", "http://127.0.0.1:1")
        assert ended.code == 2
        assert "--base-url=http://127.0.0.1:1: does not answer: no connection" in ended.stderr

    def test_a_key_is_wanted(self, bench: Any, app: App) -> None:
        app.wants_key = True
        ended = bench(*LENGTHS)
        assert ended.code == 2
        assert "--api-key=…: is not accepted (HTTP 401: who are you)" in ended.stderr

    def test_ids_need_the_ids_of_answers(self, bench: Any, app: App) -> None:
        ended = bench("--workload", "react-like", "--prompt-format", "ids")
        assert ended.code == 2
        assert "--prompt-format=ids: needs the ids of answers" in ended.stderr
        assert app.bodies == []


def test_help_names_the_parts() -> None:
    assert "bench" in root.commands
    assert sorted(root.commands["bench"].commands) == ["offline", "serve", "workloads"]  # type: ignore[attr-defined]
