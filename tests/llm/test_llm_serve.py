"""``kvell serve`` with a real model, as a person would run it: client, kill, restart."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import ollama
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvell import BeamSearchParams, SamplingParams
from tests.llm.servers import PATIENCE_SECONDS, Served
from tests.llm.teacher import smollm2

pytestmark = pytest.mark.xdist_group("packaged_server")
LONG_STORY_TOKENS = 64
"""So many that the instance is killed while it computes them."""


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def instance_pid(self) -> int:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])


@pytest.fixture(scope="module")
def server(packaged_server: Served) -> Server:
    return Server(packaged_server.url, packaged_server.pid)


def scraped(url: str) -> dict[str, float]:
    """Samples of a server, summed over labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while httpx.get(f"{url}/health").status_code != 200:
        assert time.monotonic() < deadline, "the front did not restart its instance"
        time.sleep(0.1)


def ask(client: openai.OpenAI, text: str, max_tokens: int) -> openai.Stream[object]:
    return client.chat.completions.create(  # type: ignore[return-value]
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def said(stream: openai.Stream[object]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)  # type: ignore[attr-defined]


def test_beams_over_http_are_those_of_the_library(server: Server, shallow_path: Path) -> None:
    """The prompt is computed once; then each beam computes one token in each step."""
    prompt, beams = "Of all the rivers of Europe", {"use_beam_search": True}
    before = scraped(server.url)
    reply = server.client().completions.create(
        model="smollm2", prompt=prompt, max_tokens=6, best_of=4, n=2, extra_body=beams
    )
    [found] = smollm2(shallow_path).beam_search(prompt, BeamSearchParams(4, 6))
    assert [choice.text for choice in reply.choices] == [one.text for one in found.sequences[:2]]
    assert reply.usage is not None
    prompt_tokens = reply.usage.prompt_tokens
    assert prompt_tokens == len(found.prompt_token_ids)
    after = scraped(server.url)

    def grown(name: str) -> float:
        return after[f"kvell:{name}"] - before.get(f"kvell:{name}", 0)

    computed = grown("prefix_cache_queries_total") - grown("prefix_cache_hits_total")
    assert computed == prompt_tokens + 4 * 5 == found.computed_tokens


def test_a_chat_completion_streams_and_repeats(server: Server, shallow_path: Path) -> None:
    """The second time the prompt is a prefix hit, and the answer is the same."""
    client = server.client()
    first = said(ask(client, "Name the capital of France.", 24))
    messages = [{"role": "user", "content": "Name the capital of France."}]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [expected] = smollm2(shallow_path).chat(messages, params)
    assert first == expected.text
    assert said(ask(client, "Name the capital of France.", 24)) == first
    metrics = httpx.get(f"{server.url}/metrics").text
    hits = [line for line in metrics.splitlines() if "prefix_cache_hits_total{" in line]
    assert float(hits[0].split()[-1]) > 0


def test_ollamas_client_gets_the_same_answers(server: Server, shallow_path: Path) -> None:
    client, options = ollama.Client(server.url), ollama.Options(num_predict=12, temperature=0)
    text, params = "The capital of France is", SamplingParams(temperature=0, max_tokens=12)
    reply = client.generate("smollm2:latest", text, raw=True, options=options)
    [expected] = smollm2(shallow_path).generate(text, params)
    assert reply.response == expected.text
    asked = [{"role": "user", "content": text}]
    [expected] = smollm2(shallow_path).chat(asked, params)
    pieces = list(client.generate("smollm2", text, stream=True, options=options))
    assert "".join(piece.response or "" for piece in pieces) == expected.text
    formed = client.chat("smollm2", asked, format={"type": "boolean"}, options=options)
    assert formed.message.content in ("true", "false")


def test_metrics_tell_what_an_answer_took_and_where_its_pages_are(server: Server) -> None:
    before = scraped(server.url)
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
    after = scraped(server.url)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def seconds(stage: str) -> float:
        return grown[f"kvell:request_{stage}_time_seconds_sum"]

    assert grown["kvell:request_generation_tokens_sum"] == 8
    assert seconds("prefill") > 0
    assert seconds("decode") > 0
    assert seconds("inference") == pytest.approx(seconds("prefill") + seconds("decode"))
    whole = grown["kvell:e2e_request_latency_seconds_sum"]
    assert seconds("queue") + seconds("inference") <= whole
    assert grown["kvell:iteration_tokens_total_count"] == grown["kvell:steps_total"] == 8
    prompt = grown["kvell:request_prefill_kv_computed_tokens_sum"]
    assert grown["kvell:iteration_tokens_total_sum"] == prompt + 7, "the last token is not computed"
    assert after["kvell:group_cached_pages"] > 0
    assert after["kvell:group_used_pages"] == after["kvell:kv_cache_usage_perc"] == 0


def test_a_stream_goes_on_after_its_instance_was_killed(server: Server) -> None:
    client = server.client()
    short = said(ask(client, "Name the capital of France.", 24))
    stream = ask(client, "Tell me a long story about the sea.", LONG_STORY_TOKENS)
    first = next(stream).choices[0].delta.content or ""  # type: ignore[attr-defined]
    killed = server.instance_pid()
    os.kill(killed, signal.SIGKILL)
    told = first + said(stream)
    wait_until_healthy(server.url)
    assert server.instance_pid() != killed
    assert said(ask(client, "Tell me a long story about the sea.", LONG_STORY_TOKENS)) == told
    assert said(ask(client, "Name the capital of France.", 24)) == short
