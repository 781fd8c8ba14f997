"""A router outside hears what a real server caches, and that a dead instance caches nothing."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from transformers import AutoTokenizer

from tests.llm.conftest import Configured
from tests.llm.servers import PATIENCE_SECONDS

pytestmark = pytest.mark.xdist_group("configured_server")
HEADERS = {"Authorization": "Bearer red-key"}
OPERATOR = {"Authorization": "Bearer ops-key"}
BLOCK_TOKENS = 16
PROMPT = " ".join(f"The number {number} is followed by {number + 1}." for number in range(20))


@dataclass
class Observed:
    url: str
    socket: "zmq.Socket[bytes]"

    def events(self, until: str) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        while not any(event["type"] == until for event in told):
            assert self.socket.poll(int(1000 * PATIENCE_SECONDS)), f"no {until} came"
            _, number, batch = self.socket.recv_multipart()
            assert len(number) == 8
            told += msgspec.msgpack.decode(batch)[1]
        return told

    def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
        reply = httpx.post(
            f"{self.url}/v1/completions", json=body, headers=HEADERS, timeout=PATIENCE_SECONDS
        )
        assert reply.status_code == 200, reply.text
        told: dict[str, Any] = reply.json()
        return told


@pytest.fixture(scope="module")
def served(configured_server: Configured) -> Iterator[Observed]:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.connect(configured_server.events)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv")
    served = Observed(configured_server.url, socket)
    attempt = 0
    while not socket.poll(50):  # until the subscription is heard
        served.complete(f"{attempt} " * 40)
        attempt += 1
    while socket.poll(200):
        socket.recv_multipart()
    yield served
    context.destroy(linger=0)


def test_a_prompt_s_blocks_are_told_with_their_tokens(served: Observed, shallow_path: Path) -> None:
    served.complete(PROMPT)
    tokenizer = AutoTokenizer.from_pretrained(shallow_path)
    ids = tokenizer(PROMPT)["input_ids"]
    (stored,) = [one for one in served.events("BlockStored") if one["type"] == "BlockStored"][:1]
    whole = len(ids) // BLOCK_TOKENS
    assert stored["block_size"] == BLOCK_TOKENS
    assert stored["parent_block_hash"] is None
    assert stored["token_ids"][: whole * BLOCK_TOKENS] == ids[: whole * BLOCK_TOKENS]
    assert stored["kv_cache_spec_kind"] == "full_attention"
    # Cached blocks are not told again, and what follows them names its parent.
    cached = stored["block_hashes"][whole - 1]
    ids_text = tokenizer.decode(ids[: whole * BLOCK_TOKENS])
    reply = served.complete(ids_text + " and then there was something else entirely" * 4)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= (whole - 1) * BLOCK_TOKENS
    (more,) = [one for one in served.events("BlockStored") if one["type"] == "BlockStored"][:1]
    assert not set(more["block_hashes"]) & set(stored["block_hashes"])
    assert more["parent_block_hash"] in (cached, stored["block_hashes"][whole - 2])


def test_evicted_blocks_are_told(served: Observed) -> None:
    for number in range(5):  # the pool has some 700 tokens
        served.complete(f"{number} is where this begins. {PROMPT}")
    told = served.events("BlockRemoved")
    (removed,) = [event for event in told if event["type"] == "BlockRemoved"][:1]
    assert removed["block_hashes"]


@pytest.mark.long
def test_a_dead_instance_has_nothing_cached(served: Observed) -> None:
    (instance,) = httpx.get(f"{served.url}/cluster", headers=OPERATOR, timeout=60).json()[
        "instances"
    ]
    os.kill(instance["pid"], signal.SIGKILL)
    told = served.events("AllBlocksCleared")
    assert told[-1]["type"] == "AllBlocksCleared"
    while httpx.get(f"{served.url}/health", timeout=60).status_code != 200:
        pass
    reply = served.complete(PROMPT)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert served.events("BlockStored")
