"""Servers by configuration: each is started once, by whichever file of its group comes first.

Every file that asks for one of them has ``pytestmark = pytest.mark.xdist_group(…)`` with its
configuration's name, so that all of them run in one worker.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from kvell import LLM
from kvell.models.loading.random_weights import write_random_model
from kvell.models.sources.packaged import MODEL_NAME
from tests.llm.broken_models import write_broken, write_poisoned
from tests.llm.pictures import write_picture_model
from tests.llm.servers import Served, serving
from tests.llm.teacher import smollm2
from tests.models.harness import tiny_config

WORDS = 49_152
KEYS = """
[[keys]]
name = "red"
key = "red-key"

[[keys]]
name = "blue"
key = "blue-key"

[[keys]]
name = "ops"
key = "ops-key"
operator = true
"""
PARTS = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}"
    "{{ part.text }}{% endfor %}{% endfor %}"
)
"""A chat template that reads a message's parts."""


@pytest.fixture(scope="session")
def packaged_server(shallow_path: Path) -> Iterator[Served]:
    """One instance of the packaged model, with parsers, in steps of at most 64 tokens."""
    flags = ["--kv-memory", "128MiB", "--dtype", "float32", "--max-num-batched-tokens", "64"]
    flags += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    with serving(shallow_path.parent, *flags) as served:
        yield served
        audit = httpx.get(f"{served.url}/debug/audit", timeout=60).json()
        assert audit["clean"], audit
        assert httpx.get(f"{served.url}/debug/memory", timeout=60).json()


@pytest.fixture(scope="module")
def url(packaged_server: Served) -> str:
    return packaged_server.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@dataclass(frozen=True)
class Configured:
    """A server with keys, four seats, a chat template of its own, and a socket of events."""

    served: Served
    template: Path
    events: str

    @property
    def url(self) -> str:
        return self.served.url


@pytest.fixture(scope="session")
def configured_server(
    shallow_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Configured]:
    """The packaged model with little memory, and all that an operator gives a server as files."""
    directory = tmp_path_factory.mktemp("configured")
    keys, template, events = directory / "keys.toml", directory / "parts.jinja", directory / "kv"
    keys.write_text(KEYS)
    template.write_text(PARTS)
    address = f"ipc://{events}"
    flags = ["--kv-memory", "5MiB", "--dtype", "float32", "--max-num-seqs", "4"]
    flags += ["--api-key-file", str(keys), "--chat-template", str(template)]
    flags += ["--kv-events-config", json.dumps({"endpoint": address, "topic": "kv"})]
    with serving(shallow_path.parent, *flags) as served:
        yield Configured(served, template, address)


@pytest.fixture(scope="session")
def small_model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of windows and full attention that reads SmolLM2's tokens."""
    config = tiny_config("Gemma3ForCausalLM", vocab_size=WORDS)
    path = write_random_model(tmp_path_factory.mktemp("small"), config, 1, scale=4.0)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_path / name, path)
    return path


@pytest.fixture(scope="session")
def several_server(
    smollm2_path: Path, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Four models in one instance that plans ahead; two of them give NaN."""
    models = tmp_path_factory.mktemp("models")
    flags = ["--kv-memory", "64MiB", "--dtype", "float32", "--async-scheduling"]
    flags += ["--model", MODEL_NAME, "--model", f"small={small_model}"]
    flags += ["--model", f"poisoned={write_poisoned(models / 'poisoned', smollm2_path)}"]
    flags += ["--model", f"broken={write_broken(models / 'broken', smollm2_path)}"]
    with serving(smollm2_path.parent, *flags) as served:
        yield served


@pytest.fixture(scope="session")
def picture_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama 3.2 Vision with random weights, as a directory with a processor of its own."""
    return write_picture_model(tmp_path_factory.mktemp("pictures") / "pictures")


@pytest.fixture(scope="session")
def picture_server(smollm2_path: Path, picture_path: Path) -> Iterator[Served]:
    flags = ["--model", f"pictures={picture_path}", "--kv-memory", "8MiB", "--dtype", "float32"]
    with serving(smollm2_path.parent, *flags, "--max-model-len", "256") as served:
        yield served


@pytest.fixture(scope="module")
def llm(shallow_path: Path) -> LLM:
    return smollm2(shallow_path)
