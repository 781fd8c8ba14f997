"""What hostile clients do: each kind of attack is one coroutine that runs until it is cancelled.

``python -m bench.server.hostile.attacks URL KIND …`` runs one client of each kind named, in a
process of its own, and tells on stdin's end how the server answered.
"""

import asyncio
import base64
import contextlib
import io
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.server.hostile.bodies import hostile_bodies
from bench.server.slow_masks import AMBIGUOUS_GRAMMAR

KEY = "hostile"
POISONED = "poisoned"
"""Name of the model whose logits are not numbers."""
PAUSE_SECONDS = 1.0
"""Between an answer and the next try of the same client."""
ANSWER_SECONDS = 120.0
SILENT = 64
"""Connections that one silent client holds."""
GRAMMARS = (
    "start: A\nA: /.*d.{15}/ & /.*r.{14}/ & ~/.*0.{13}/",
    "start: A\nA: /.*a.{18}/ & ~/.*b.{17}/",
    "start: A\nA: /(.*x.{12}){3}/ & ~/.*y.{15}/",
)
SPECIAL_TOKEN = 3
"""A token of SmolLM2 without text."""
WORD_TOKEN = 1000
FLOOD = 8
"""Requests that a flooding client has under way together."""
LONG_TEXT = "word " * (31_000_000 // 5)
PIXELS = (8192, 4096)
PICTURES = 32


class Attacker:
    """One hostile client.

    :ivar answers: how often the server answered with which status.
    """

    def __init__(self, url: str, answers: Counter[str], kind: str, seed: int = 0) -> None:
        self._url, self._answers, self._kind = url, answers, kind
        self._bodies = hostile_bodies(seed, "smollm2")
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._turn = 0

    async def grammar(self, http: httpx.AsyncClient) -> None:
        """Ask for answers that follow grammars which are costly to compile."""
        grammar = GRAMMARS[self._turn % len(GRAMMARS)] + " " * (self._turn // len(GRAMMARS))
        await self._post(http, prompt="x", structured_outputs={"grammar": grammar}, max_tokens=8)

    async def corpus(self, http: httpx.AsyncClient) -> None:
        """Send random bodies that are costly to look at."""
        sent = next(self._bodies)
        answer = await http.post(
            self._url + sent.path, content=sent.body, headers=dict(sent.headers)
        )
        self._answers[f"{self._kind}: {answer.status_code}"] += 1

    async def ambiguous(self, http: httpx.AsyncClient) -> None:
        """Ask for many answers whose grammar takes ever longer to follow."""
        asked = {"grammar": AMBIGUOUS_GRAMMAR + " " * self._turn}
        await self._post(http, prompt="x", structured_outputs=asked, max_tokens=64, n=16)

    async def textless(self, http: httpx.AsyncClient) -> None:
        """Ask for log probabilities of tokens without text."""
        bias = {str(SPECIAL_TOKEN): 100}
        await self._post(http, prompt="x", logit_bias=bias, logprobs=5, max_tokens=2000, n=4)

    async def deadline(self, http: httpx.AsyncClient) -> None:
        """Ask for much, and let a deadline end it."""
        asked: dict[str, Any] = {"deadline_seconds": 1.5, "ignore_eos": True}
        await self._post(http, prompt="x", max_tokens=2000, n=32, **asked)

    async def flood(self, _http: httpx.AsyncClient) -> None:
        """Read the metrics without a key, again and again."""
        until = time.monotonic() + 10 * PAUSE_SECONDS
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS) as keyless:
            await asyncio.gather(*(self._scrape(keyless, until) for _ in range(FLOOD)))

    async def slow_reader(self, _http: httpx.AsyncClient) -> None:
        """Ask for a long answer in one piece, and read some bytes a second of it."""
        body = json.dumps({"tokens": [WORD_TOKEN] * 1_000_000}).encode()
        async with self._asked("/detokenize", body) as reader:
            for _ in range(20):
                if not await reader.read(2048):
                    break
                await asyncio.sleep(PAUSE_SECONDS)

    async def long_text(self, http: httpx.AsyncClient) -> None:
        """Send a conversation of 31 MB."""
        half = len(LONG_TEXT) // 2
        messages = [{"role": "user", "content": LONG_TEXT[:half]}] * 2
        await self._post(http, "/v1/chat/completions", messages=messages, max_tokens=1)

    async def tokenize(self, http: httpx.AsyncClient) -> None:
        """Ask for the tokens of a text of 8 MB."""
        await self._post(http, "/tokenize", prompt=LONG_TEXT[: 8 << 20])

    async def crowd(self, http: httpx.AsyncClient) -> None:
        """Ask for 15 answers to each of 128 prompts."""
        await self._post(http, prompt=[f"say {one}" for one in range(128)], n=15, max_tokens=64)

    async def urgent(self, http: httpx.AsyncClient) -> None:
        """Claim to be more urgent than anybody."""
        await self._post(http, prompt="now", priority=-(1 << 30), max_tokens=64)

    async def poisoned(self, http: httpx.AsyncClient) -> None:
        """Ask the model whose logits are not numbers."""
        await self._post(http, prompt="hello", model=POISONED, temperature=0.5, max_tokens=4)

    async def pictures(self, http: httpx.AsyncClient) -> None:
        """Send a little file that becomes gigabytes."""
        part = {"type": "image_url", "image_url": {"url": _flat_picture()}}
        content = [part] * PICTURES
        message = {"role": "user", "content": content}
        await self._post(http, "/v1/chat/completions", messages=[message], max_tokens=1)

    async def silent(self, _http: httpx.AsyncClient) -> None:
        """Open connections and say nothing."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(SILENT):
                _, writer = await self._connected()
                stack.callback(writer.close)
            await asyncio.sleep(20 * PAUSE_SECONDS)

    async def slow_head(self, _http: httpx.AsyncClient) -> None:
        """Send the head of a request one byte at a time."""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nX: {'x' * 4000}\r\n"
        await self._trickle(b"", head.encode())

    async def slow_body(self, _http: httpx.AsyncClient) -> None:
        """Announce a long body and send it one byte at a time."""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\n"
        head += f"Authorization: Bearer {KEY}\r\nContent-Length: 1000000\r\n\r\n"
        await self._trickle(head.encode(), b" " * 1000)

    async def deaf(self, _http: httpx.AsyncClient) -> None:
        """Ask for a long stream and read nothing of it."""
        asked = {"prompt": "count", "stream": True, "max_tokens": 2000, "ignore_eos": True, "n": 8}
        async with self._asked("/v1/completions", json.dumps(asked).encode()):
            await asyncio.sleep(20 * PAUSE_SECONDS)

    async def run(self, attack: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        """Attack again and again."""
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS, headers=headers) as http:
            while True:
                try:
                    await attack(http)
                except (httpx.HTTPError, OSError) as error:
                    self._answers[f"{self._kind}: {type(error).__name__}"] += 1
                self._turn += 1
                await asyncio.sleep(PAUSE_SECONDS)

    async def _post(
        self, http: httpx.AsyncClient, path: str = "/v1/completions", **body: object
    ) -> None:
        answer = await http.post(self._url + path, json=body)
        self._answers[f"{self._kind}: {answer.status_code}"] += 1

    async def _scrape(self, http: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            answer = await http.get(f"{self._url}/metrics")
            self._answers[f"{self._kind}: {answer.status_code}"] += 1

    @contextlib.asynccontextmanager
    async def _asked(self, path: str, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
        """Send a request; the caller reads as much of the answer as it likes."""
        reader, writer = await self._connected()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\n"
        head += f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            await writer.drain()
            yield reader
        finally:
            writer.close()

    async def _trickle(self, at_once: bytes, slowly: bytes) -> None:
        """Send bytes, some of them one at a time, until the server hangs up."""
        reader, writer = await self._connected()
        try:
            writer.write(at_once)
            for byte in slowly:
                writer.write(bytes([byte]))
                await writer.drain()
                if reader.at_eof():
                    break
                await asyncio.sleep(0.2)
        finally:
            writer.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port)


TEXT_KINDS = (
    *("grammar", "long_text", "tokenize", "crowd", "urgent", "poisoned"),
    *("silent", "slow_head", "slow_body", "deaf", "slow_reader", "flood"),
    *("corpus", "ambiguous", "textless", "deadline", "corpus", "corpus", "corpus", "corpus"),
)
PICTURE_KINDS = ("pictures", "silent", "slow_body")


def _flat_picture() -> str:
    """A PNG of one colour as a data URL."""
    # Imported here: only clients with pictures need it.
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", PIXELS).save(file, "PNG", compress_level=9)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def _attack(url: str, kinds: list[str]) -> Counter[str]:
    """Run a client of each kind until stdin ends."""
    answers: Counter[str] = Counter()
    clients = [
        asyncio.create_task(attacker.run(getattr(attacker, kind)))
        for number, kind in enumerate(kinds)
        if (attacker := Attacker(url, answers, kind, number))
    ]
    await asyncio.to_thread(sys.stdin.read)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return answers


if __name__ == "__main__":
    os.nice(10)  # so that these clients do not delay the tenant's on the same processors
    told = asyncio.run(_attack(sys.argv[1], sys.argv[2:]))
    print(json.dumps(told, sort_keys=True))
