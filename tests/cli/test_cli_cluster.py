"""``kvell cluster`` against a small server on a real socket; time passes with each question."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kvell.clock import VirtualClock
from tests.cli.conftest import FakeModel

Kvell = Callable[..., Any]
KEY = "secret"
SIZES = ("1", "MiB", "3", "MiB")
NEXT = {"starting": "serving", "draining": "gone", "serving": "serving", "failed": "failed"}


@dataclass
class FakeCluster:
    """A server's instances; with each question the next of them gets to where it goes.

    :param stuck: no instance ever changes its state.
    :param broken: new instances fail.
    :param fault: a status and a body that answer everything.
    """

    clock: VirtualClock
    states: dict[str, str] = field(default_factory=lambda: {"mixed-0": "serving"})
    stuck: bool = False
    broken: bool = False
    key: str | None = None
    fault: tuple[int, bytes] | None = None
    asked: list[tuple[str, Any]] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)
    serves_as: dict[str, str] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: bytes, key: str | None) -> tuple[int, bytes]:
        self.clock.advance(1.0)
        self.asked.append((f"{method} {path}", json.loads(body) if body else None))
        if self.fault is not None:
            return self.fault
        if self.key is not None and key != f"Bearer {self.key}":
            return 401, error("the API key is wrong")
        if (method, path) == ("GET", "/cluster"):
            self._moment_later()
            return 200, self._state()
        if (method, path) == ("POST", "/cluster/scale"):
            return self._scale(json.loads(body)["instances"]["mixed"])
        if (method, path) == ("POST", "/cluster/drain"):
            return self._drain(json.loads(body)["id"])
        return 404, error("Not Found")

    def _moment_later(self) -> None:
        for name, state in self.states.items():
            following = "failed" if self.broken and state == "starting" else NEXT[state]
            if not self.stuck and following != state:
                self.states[name] = following
                break
        self.states = {name: state for name, state in self.states.items() if state != "gone"}

    def _scale(self, wanted: int) -> tuple[int, bytes]:
        if wanted > 8:
            return 400, error(f"instances={wanted}: need more memory than there is; use at most 8")
        staying = [name for name, state in self.states.items() if state == "serving"]
        self.states |= dict.fromkeys(staying[wanted:], "draining")
        self.states |= {f"mixed-{n}": "starting" for n in range(len(staying), wanted)}
        return 202, self._state()

    def _drain(self, name: str) -> tuple[int, bytes]:
        if name not in self.states:
            return 404, error(f"id={name}: is not an instance; use one of {', '.join(self.states)}")
        self.states[name] = "draining"
        return 202, self._state()

    def _state(self) -> bytes:
        instances = [
            instance(name, state)
            | ({"host": self.hosts[name]} if name in self.hosts else {})
            | ({"serves_as": self.serves_as[name]} if name in self.serves_as else {})
            for name, state in self.states.items()
        ]
        front = {"pid": 1, "waiting": 1234}
        body = {"routing": "least-load", "front": front, "instances": instances}
        return json.dumps(body | {"contract_bytes": 3 << 20, "new_field": 1}).encode()


def instance(name: str, state: str) -> dict[str, Any]:
    pages = {"large_pages": 10, "empty_large_pages": 4, "free_bytes": 1 << 20}
    return {
        "id": name,
        "pid": None if state == "starting" else 123,
        "role": "mixed",
        "state": state,
        "incarnation": 2**62,
        "restarts": 0,
        "in_flight": 3,
        "outstanding_prompt_tokens": 5000,
        "outstanding_output_tokens": 40,
        "pages": pages,
        "contract_bytes": 2 << 20,
        "sections": {"lent": 6, "borrowed": 0},
    }


def error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()


@pytest.fixture
def fake(model: FakeModel) -> FakeCluster:
    return FakeCluster(model.clock)


@pytest.fixture
def url(fake: FakeCluster) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, body: bytes) -> None:
            key = self.headers["Authorization"]
            status, content = fake.answer(self.command, self.path, body, key)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cluster(kvell: Kvell, url: str, monkeypatch: pytest.MonkeyPatch) -> Kvell:
    """Run ``kvell cluster`` against the server, without pauses between its questions."""
    monkeypatch.setattr("kvell.cli.cluster.commands.POLL_SECONDS", 0.0)
    return lambda *args: kvell("cluster", *args, "--url", url)


def states(ended: Any) -> dict[str, str]:
    return {one["id"]: one["state"] for one in json.loads(ended.stdout)["instances"]}


class TestStatus:
    def test_is_a_table_for_people(self, cluster: Kvell) -> None:
        ended = cluster("status")
        assert ended.code == 0
        title, _, _, row, total = (line for line in ended.stdout.splitlines() if line.strip())
        assert title.strip() == "routing least-load, 1,234 requests wait for an instance"
        shown = ["mixed-0", "serving", "123", "0", "3", "5,000", "40", "10", "(4)"]
        assert row.split() == [*shown, "1", "MiB", "6,", "0", "2", "MiB"]
        assert total.split() == ["front", "and", "all", "1", "0", "3", "5,000", "40", *SIZES]

    def test_a_role_that_has_changed_is_shown(self, cluster: Kvell, fake: FakeCluster) -> None:
        fake.serves_as = {"mixed-0": "prefill"}
        row = next(line for line in cluster("status").stdout.splitlines() if "mixed-0" in line)
        assert row.split()[:4] == ["mixed-0", "as", "prefill", "serving"]

    def test_machines_are_shown_where_there_are_several(
        self, cluster: Kvell, fake: FakeCluster
    ) -> None:
        fake.hosts = {"mixed-0": "10.0.0.7"}
        headers, *_, row, total = (
            line for line in cluster("status").stdout.splitlines()[1:] if line.strip()
        )
        assert headers.split()[-1] == "machine"
        assert row.split()[-1] == "10.0.0.7"
        assert total.split()[-1] == "MiB"

    def test_is_the_servers_own_words_in_json(self, cluster: Kvell) -> None:
        ended = cluster("status", "--json")
        said = json.loads(ended.stdout)
        assert said["new_field"] == 1
        assert said["instances"] == [instance("mixed-0", "serving")]

    def test_shows_an_instance_without_a_process(self, cluster: Kvell, fake: FakeCluster) -> None:
        fake.states, fake.stuck = {"mixed-0": "starting"}, True
        assert " – " in cluster("status").stdout

    @pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
    def test_takes_the_address_of_the_api_too(self, kvell: Kvell, url: str, end: str) -> None:
        assert kvell("cluster", "status", "--url", url + end).code == 0


class TestScale:
    def test_waits_until_all_serve(self, cluster: Kvell, fake: FakeCluster) -> None:
        ended = cluster("scale", "mixed=3", "--json")
        assert ended.code == 0
        assert states(ended) == dict.fromkeys(("mixed-0", "mixed-1", "mixed-2"), "serving")
        assert fake.asked[0] == ("POST /cluster/scale", {"instances": {"mixed": 3}})
        assert ended.stderr.splitlines() == [
            "kvell: 1 of 3 mixed instances serve, mixed-1 is starting, mixed-2 is starting …",
            "kvell: 2 of 3 mixed instances serve, mixed-2 is starting …",
        ]

    def test_waits_until_none_drains(self, cluster: Kvell, fake: FakeCluster) -> None:
        fake.states = dict.fromkeys(("mixed-0", "mixed-1", "mixed-2"), "serving")
        ended = cluster("scale", "1", "--json")
        assert ended.code == 0
        assert states(ended) == {"mixed-0": "serving"}

    def test_need_not_wait(self, cluster: Kvell, fake: FakeCluster) -> None:
        ended = cluster("scale", "mixed=2", "--no-wait", "--json")
        assert states(ended) == {"mixed-0": "serving", "mixed-1": "starting"}
        assert len(fake.asked) == 1

    def test_what_is_so_already_takes_no_question_more(
        self, cluster: Kvell, fake: FakeCluster
    ) -> None:
        assert cluster("scale", "mixed=1").code == 0
        assert len(fake.asked) == 1

    def test_waits_no_longer_than_asked(self, cluster: Kvell, fake: FakeCluster) -> None:
        fake.stuck = True
        ended = cluster("scale", "mixed=2", "--timeout", "5")
        assert ended.code == 1
        assert ended.stderr.splitlines()[-1] == (
            "kvell: not done within 5 s; the server continues: "
            "1 of 2 mixed instances serve, mixed-1 is starting"
        )
        assert len(fake.asked) == 6
        assert ended.stdout == ""

    def test_does_not_wait_for_an_instance_that_failed(
        self, cluster: Kvell, fake: FakeCluster
    ) -> None:
        fake.broken = True
        ended = cluster("scale", "mixed=2")
        assert ended.code == 1
        last = "kvell: mixed-1 failed; the server's output says why"
        assert ended.stderr.splitlines()[-1] == last

    @pytest.mark.parametrize("text", ["mixed=0", "0", "drafts=1", "many"])
    def test_what_cannot_be_is_refused_before_the_server_is_asked(
        self, cluster: Kvell, fake: FakeCluster, text: str
    ) -> None:
        ended = cluster("scale", text)
        assert ended.code == 2
        assert ended.stderr.startswith(f"kvell: instances={'mixed=0' if text == '0' else text}: ")
        assert fake.asked == []

    def test_the_servers_reason_is_the_line(self, cluster: Kvell) -> None:
        ended = cluster("scale", "mixed=9")
        assert ended.code == 2
        line = "kvell: instances=9: need more memory than there is; use at most 8\n"
        assert ended.stderr == line


class TestDrain:
    def test_waits_until_it_is_gone(self, cluster: Kvell, fake: FakeCluster) -> None:
        fake.states["mixed-1"] = "serving"
        ended = cluster("drain", "mixed-1", "--json")
        assert ended.code == 0
        assert states(ended) == {"mixed-0": "serving"}
        assert fake.asked[0] == ("POST /cluster/drain", {"id": "mixed-1"})
        assert ended.stderr == "kvell: mixed-1 is draining …\n"

    def test_a_failed_instance_elsewhere_does_not_matter(
        self, cluster: Kvell, fake: FakeCluster
    ) -> None:
        fake.states = {"mixed-0": "serving", "mixed-1": "failed", "mixed-2": "serving"}
        ended = cluster("drain", "mixed-2", "--json")
        assert ended.code == 0
        assert states(ended) == {"mixed-0": "serving", "mixed-1": "failed"}

    def test_need_not_wait(self, cluster: Kvell, fake: FakeCluster) -> None:
        ended = cluster("drain", "mixed-0", "--no-wait", "--json")
        assert states(ended) == {"mixed-0": "draining"}

    def test_an_unknown_id_is_refused_with_the_known_ones(self, cluster: Kvell) -> None:
        ended = cluster("drain", "mixed-7")
        assert ended.code == 2
        assert ended.stderr == "kvell: id=mixed-7: is not an instance; use one of mixed-0\n"


class TestFaults:
    def test_the_key_is_sent(self, cluster: Kvell, fake: FakeCluster) -> None:
        fake.key = KEY
        assert cluster("scale", "mixed=2", "--api-key", KEY).code == 0

    def test_a_key_may_be_in_a_variable(
        self, cluster: Kvell, fake: FakeCluster, environ: dict[str, str]
    ) -> None:
        fake.key = KEY
        assert cluster("status").code == 2
        environ["KVELL_API_KEY"] = KEY
        assert cluster("status").code == 0

    @pytest.mark.parametrize(
        ("given", "problem"),
        [((), "is needed"), (("--api-key", "guess"), "is not accepted")],
    )
    def test_a_key_that_is_missing_or_wrong(
        self, cluster: Kvell, fake: FakeCluster, given: tuple[str, ...], problem: str
    ) -> None:
        fake.key = KEY
        ended = cluster("status", *given)
        assert ended.code == 2
        reason = f"{problem} (HTTP 401: the API key is wrong); give the server's key"
        assert ended.stderr == f"kvell: --api-key=…: {reason}\n"

    def test_a_key_that_is_no_header(self, cluster: Kvell, fake: FakeCluster) -> None:
        ended = cluster("status", "--api-key", "a\r\nb")
        assert ended.code == 2
        assert ended.stderr.startswith("kvell: --api-key=…: cannot be sent; ")
        assert fake.asked == []

    def test_a_server_that_is_not_there(self, kvell: Kvell) -> None:
        ended = kvell("cluster", "status", "--url", "http://127.0.0.1:1")
        assert ended.code == 2
        line = (
            "kvell: --url=http://127.0.0.1:1: does not answer (Connection refused); "
            "start the server, or give its address\n"
        )
        assert ended.stderr == line

    @pytest.mark.parametrize("address", ["127.0.0.1:8000", "http://", "http://a:99999", "http://["])
    def test_what_is_no_address(self, kvell: Kvell, address: str) -> None:
        ended = kvell("cluster", "status", "--url", address)
        assert ended.code == 2
        assert ended.stderr.startswith(f"kvell: --url={address}: is not an address of a server; ")

    def test_a_name_that_cannot_be_written(self, kvell: Kvell) -> None:
        ended = kvell("cluster", "status", "--url", "http://a..b")
        assert ended.code == 2
        assert ended.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("status", "body"),
        [(404, b""), (200, b"<html>"), (200, b"{}"), (200, b"\xff"), (302, b"")],
    )
    def test_another_server(
        self, cluster: Kvell, fake: FakeCluster, status: int, body: bytes
    ) -> None:
        fake.fault = (status, body)
        ended = cluster("status")
        assert ended.code == 2
        assert ended.stderr.endswith("instances it has; give the address of `kvell serve`\n")

    @pytest.mark.parametrize(
        ("status", "problem"), [(503, "cannot do it now: why"), (500, "failed (HTTP 500: why)")]
    )
    def test_a_server_in_trouble(
        self, cluster: Kvell, fake: FakeCluster, url: str, status: int, problem: str
    ) -> None:
        fake.fault = (status, error("why"))
        ended = cluster("status")
        assert ended.code == 1
        assert ended.stderr == f"kvell: {url} {problem}\n"
