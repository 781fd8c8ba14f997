"""Long texts at a real server: refused unread, or encoded behind short ones in bounded memory."""

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvell.vocabulary import KIB, MIB
from tests.llm.servers import PATIENCE_SECONDS, Served

pytestmark = pytest.mark.xdist_group("packaged_server")
SENTENCE = "The quick brown fox jumps over the lazy dog. "
LONG_TEXTS = 4


@dataclass(frozen=True)
class LongTexts:
    """A server's URL, and the pid of its front."""

    url: str
    pid: int

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_SECONDS)

    def largest_bytes(self) -> int:
        """The most memory that the front has had since :meth:`forget_largest`."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(one.split()[1]) * KIB for one in lines if one.startswith("VmHWM"))

    def forget_largest(self) -> int:
        """Begin again to look for the most; return the memory of now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self.largest_bytes()

    def refused(self) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        [line] = [one for one in lines if "rejections_total{" in one and '"text_bytes"' in one]
        return float(line.split()[-1])


@pytest.fixture(scope="module")
def served(packaged_server: Served) -> LongTexts:
    found = LongTexts(packaged_server.url, packaged_server.pid)
    found.post("/v1/completions", prompt="warm", max_tokens=1)
    return found


def test_31_megabytes_are_refused_without_being_encoded(served: LongTexts) -> None:
    half = SENTENCE * (15_500_000 // len(SENTENCE))  # no string of a body has more than 16 MiB
    told, before_bytes = served.refused(), served.forget_largest()
    messages = [{"role": "user", "content": half}, {"role": "user", "content": half}]
    reply = served.post("/v1/chat/completions", messages=messages, max_tokens=1)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "messages" and "maximum context length" in error["message"]
    assert served.largest_bytes() - before_bytes < 300 * MIB, "its own bytes, some times"
    assert served.refused() == told + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["x", SENTENCE * 20_000]}),
        ("/v1/responses", {"input": SENTENCE * 20_000}),
        ("/tokenize", {"prompt": SENTENCE * 20_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": SENTENCE * 20_000}]}),
    ],
)
def test_every_way_to_a_tokenizer_has_the_bound(
    served: LongTexts, path: str, body: dict[str, Any]
) -> None:
    told = served.refused()
    reply = served.post(path, **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] in body
    assert served.refused() == told + 1


def test_a_short_prompt_is_answered_before_long_texts_that_came_first(served: LongTexts) -> None:
    text = "x y " * (500_000 // 4)
    before_bytes = served.forget_largest()
    with ThreadPoolExecutor(LONG_TEXTS) as threads:
        long: set[Future[httpx.Response]] = {
            threads.submit(served.post, "/tokenize", prompt=text) for _ in range(LONG_TEXTS)
        }
        first, waiting = wait(long, PATIENCE_SECONDS, FIRST_COMPLETED)
        short = served.post("/v1/completions", prompt="Hello", max_tokens=1)
        unread = sum(not one.done() for one in waiting)
    assert short.status_code == 200
    assert {one.result().status_code for one in first | waiting} == {200}
    assert unread >= 1, "the short prompt waited for all of them"
    parts = httpx.get(f"{served.url}/debug/memory").json()["parts"]
    assert served.largest_bytes() - before_bytes < parts["front_work_bytes"]


def test_a_text_of_long_tokens_is_not_taken_for_too_many(served: LongTexts) -> None:
    """One token of this tokenizer is 64 spaces."""
    reply = served.post("/v1/completions", prompt=" " * 64 * 200 + "x", max_tokens=1)
    assert reply.status_code == 200
    assert reply.json()["usage"]["prompt_tokens"] < 210
