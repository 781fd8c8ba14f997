"""CPU time of refusing a hostile body: from its last byte to the answer, in the front's process.

The app is a server's own, over an instance without a model; bodies come to it without a network.
Each body is sent several times, and the median is told.

``python -m bench.server.hostile_bodies``
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from starlette.types import ASGIApp, Message, Scope

from bench import result_file
from kvell.front.front import Front
from kvell.server.api.openai_api import build_app
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.testing.instance import ByteText

INSTANCE = Path("tests", "fleet", "fake_instance.py")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
COUNT = 100_000
IMAGE_BYTES = 30_000_000


@dataclass(frozen=True)
class Refusal:
    """How a body was answered.

    :param field: that the answer names; None if it names the body as a whole.
    :param cpu_milliseconds: of the whole process, median of the repetitions.
    """

    case: str
    body_bytes: int
    status: int
    field: str | None
    cpu_milliseconds: float


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body of each case."""
    deep = b'{"a":' * COUNT + b"1" + b"}" * COUNT
    message = [{"role": "user", "content": "hi"}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,IMAGE"}}
    seen = json.dumps({"model": "fake", "messages": [{"role": "user", "content": [image]}]})
    schema = b'"response_format":{"type":"json_schema","json_schema":{"schema":' + deep + b"}}"
    return {
        f"{COUNT:,} stop strings": (COMPLETIONS, _body(prompt="hi", stop=["x"] * COUNT)),
        f"schema nested {COUNT:,} deep": (
            CHAT,
            b'{"messages":[{"role":"user","content":"hi"}],' + schema + b"}",
        ),
        f"logit_bias of {COUNT:,} entries": (
            CHAT,
            _body(messages=message, logit_bias={str(i): 1 for i in range(COUNT)}),
        ),
        "image of 30 MB": (CHAT, seen.replace("IMAGE", "A" * IMAGE_BYTES).encode()),
        "text of 30 MB": (COMPLETIONS, _body(prompt="a word, and\n" * (IMAGE_BYTES // 13))),
        f"{COUNT:,} fields": (CHAT, _body(messages=message, **{f"f{i}": 1 for i in range(COUNT)})),
        "5,000 messages that are numbers": (CHAT, _body(messages=[1] * 5000)),
        "1,000,000 token ids below zero": (COMPLETIONS, _body(prompt=[-1] * 1_000_000)),
        "10,000,000 empty prompts": (
            COMPLETIONS,
            b'{"prompt":[' + b"[]," * 9_999_999 + b"[]]}",
        ),
        "no JSON, 30 MB": (COMPLETIONS, b'{"prompt":"' + b'\\"' * (IMAGE_BYTES // 2)),
    }


async def measured(repetitions: int, instance: Sequence[str]) -> list[Refusal]:
    """Every case, some times."""
    metrics = ServerMetrics("fake")
    async with Front(instance, observer=metrics) as front:
        app = build_app(front, ByteText(), metrics)
        await _ask(app, COMPLETIONS, _body(prompt="hi"))  # what is made at the first request
        told = []
        for case, (path, body) in bodies().items():
            answers = [await _ask(app, path, body) for _ in range(repetitions)]
            status, error, _ = answers[0]
            cpu = median(seconds for _, _, seconds in answers) * 1e3
            told.append(Refusal(case, len(body), status, error.get("param"), round(cpu, 2)))
        return told


async def _ask(app: ASGIApp, path: str, body: bytes) -> tuple[int, Mapping[str, str], float]:
    """Status, error and CPU seconds of one request."""
    sent: list[Message] = []
    came: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if came:
            return came.pop()
        await asyncio.Event().wait()  # the client stays until it has its answer
        raise AssertionError("nobody sets it")

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "headers": headers,
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "client": ("test", 1),
        "server": ("test", 80),
    }
    began = time.process_time()
    await app(scope, receive, send)
    seconds = time.process_time() - began
    answer = json.loads(b"".join(message.get("body", b"") for message in sent[1:]))
    return sent[0]["status"], answer.get("error", {}), seconds


def _body(**fields: object) -> bytes:
    return json.dumps({"model": "fake", **fields}).encode()


def main() -> None:
    """Print a table; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="Where to keep the figures.")
    options = parser.parse_args()
    fixed = ["--socket-fd", "{socket_fd}", "--incarnation", "{incarnation}"]
    instance = [sys.executable, str(INSTANCE), *fixed]
    refusals = asyncio.run(measured(options.repetitions, instance))
    table = Table("body", "bytes", "status", "field", "CPU ms")
    for one in refusals:
        cells = (f"{one.body_bytes:,}", str(one.status), str(one.field))
        table.add_row(one.case, *cells, f"{one.cpu_milliseconds:.1f}")
    Console().print(table)
    if options.json:
        result_file.write(options.json, [asdict(one) for one in refusals])


if __name__ == "__main__":
    main()
