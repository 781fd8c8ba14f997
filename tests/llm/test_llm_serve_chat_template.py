"""``kvell serve --chat-template``: what the model reads is what the client sent."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.llm import LLM
from tests.llm.conftest import PARTS, Configured
from tests.llm.servers import PATIENCE_SECONDS

pytestmark = pytest.mark.xdist_group("configured_server")

CONVERSATION: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]},
]
READ = "[system]Be brief.[user]Hi you"
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(configured_server: Configured) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer red-key"}
    with httpx.Client(base_url=configured_server.url, headers=headers, timeout=60) as asking:
        yield asking


def test_text_and_parts_reach_a_template_that_reads_parts(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"messages": CONVERSATION}).json()["tokens"]
    read = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert read == READ
    asked = {"messages": CONVERSATION, "max_tokens": 1}
    usage = client.post("/v1/chat/completions", json=asked).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    answered = client.post(
        "/v1/responses",
        json={
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi you"}]}],
            "max_output_tokens": 1,
        },
    ).json()
    assert answered["usage"]["input_tokens"] == len(tokens)
    [card] = client.get("/v1/models").json()["data"]
    assert card["chat_template_takes_tools"] is False


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ("--chat-template", "{% for x in y %}"),
            "--chat-template=the given text: line 1 of the template does not compile",
        ),
        pytest.param(
            ("--chat-template", "gone.jinja"),
            "--chat-template=gone.jinja: cannot be read",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--chat-template-content-format", "xml"),
            "'xml' is not one of",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_template_that_cannot_be_used_ends_the_start(
    shallow_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    environment = os.environ | {"KVELL_CACHE_DIR": str(shallow_path.parent)}
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
    ended = subprocess.run(
        [*command, "--kv-memory", "64MiB", "--max-model-len", "256", *flags],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 2, ended.stderr
    assert complaint in ended.stderr


def test_the_library_takes_the_same_words(
    shallow_path: Path, configured_server: Configured
) -> None:
    template = configured_server.template
    llm = LLM(str(shallow_path), kv_memory_bytes=64 << 20, max_model_len=256)
    conversation = [{"role": "system", "content": "Be brief."}, CONVERSATION[1]]

    def read(**more: Any) -> str:
        [output] = llm.chat(conversation, SamplingParams(max_tokens=1), **more)
        return llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    assert "Be brief." in read() and "Hi \nyou" in read()  # SmolLM2's template reads texts
    assert read(chat_template=str(template)) == READ
    assert read(chat_template=PARTS, chat_template_content_format="string") == "[system][user]"
    tools = read(chat_template="{{ tools | tojson }}{{ style }}", tools=[TOOL],
                 chat_template_kwargs={"style": "!"})  # fmt: skip
    assert json.loads(tools.removesuffix("!")) == [TOOL]
    assert read(add_generation_prompt=False) == read().removesuffix("<|im_start|>assistant\n")


PROMPT = "Pages of memory are handed out one by one. " * 12


@pytest.fixture(scope="module")
def url(configured_server: Configured) -> str:
    return configured_server.url


def cached_tokens(url: str, key: str, salt: str = "") -> int:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        reply = client.completions.create(
            model="smollm2",
            prompt=PROMPT,
            max_tokens=1,
            temperature=0,
            extra_body={"cache_salt": salt},
        )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def num_ended(url: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    named = [line for line in lines if line.startswith("kvell:request_success_total")]
    return int(sum(float(line.split()[-1]) for line in named))


def test_a_tenant_waits_for_no_backlog_that_the_instance_has(url: str) -> None:
    """The instance has all of it at once, since it is within the front's credits."""
    many = {"model": "smollm2", "prompt": [f"{n} is" for n in range(32)], "n": 8}
    many |= {"stream": True, "ignore_eos": True}
    path, red = f"{url}/v1/completions", {"Authorization": "Bearer red-key"}
    with httpx.stream("POST", path, json=many | {"max_tokens": 16}, headers=red) as reply:
        assert reply.status_code == 200, reply.read()
        lines = reply.iter_lines()  # kept: without it the connection would be closed
        next(lines)
        before = num_ended(url)
        assert before < 100, "the backlog was worked off before"
        cached_tokens(url, "blue-key")
        assert num_ended(url) - before - 1 <= 64, "a quarter of the others went first"
