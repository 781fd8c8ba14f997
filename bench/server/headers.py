"""When a stream's headers come on each interface, for a prompt of thousands of tokens.

``python -m bench.server.headers``

Each prompt is new to the caches.  The times are those from the request to the headers, and to the
first text of the answer.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bench import result_file
from bench.side_by_side.processes import SystemProcess
from bench.side_by_side.systems import free_port

START_SECONDS = 180.0
MOST_HEADER_SECONDS = 0.5
WORDS_PER_TOKEN = 1 / 3
"""At most: a number of four digits and its space have four tokens or five."""


def body_of(path: str, text: str) -> dict[str, Any]:
    """Return a streamed request of two tokens on an interface."""
    messages = [{"role": "user", "content": text}]
    fields: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
        "/v1/completions": {"prompt": text, "max_tokens": 2},
        "/v1/responses": {"input": text, "max_output_tokens": 2},
        "/v1/messages": {"messages": messages, "max_tokens": 2},
        "/api/chat": {"messages": messages, "options": {"num_predict": 2}},
    }
    return {"model": "smollm2", "stream": True, **fields[path]}


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat")


def text_of(http: httpx.Client, url: str, start: int, tokens: int) -> str:
    """Return a text of numbers that counts from ``start`` and has about the number of tokens."""
    words = [str(number) for number in range(start, start + int(tokens * WORDS_PER_TOKEN))]
    reply = http.post(f"{url}/tokenize", json={"prompt": " ".join(words)})
    share = tokens / reply.raise_for_status().json()["count"]
    return " ".join(words[: int(len(words) * share)])


def stream_times(http: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, float]:
    """Return the seconds to the headers and to the first piece of the answer."""
    begun = time.monotonic()
    with http.stream("POST", url, json=body) as reply:
        reply.raise_for_status()
        headers_seconds = time.monotonic() - begun
        next(line for line in reply.iter_lines() if has_text(line))
        return {"headers": headers_seconds, "first_piece": time.monotonic() - begun}


def has_text(line: str) -> bool:
    """Return whether a line of a stream has text of the answer, and is no announcement of it."""
    if not line.startswith(("data: {", '{"')):
        return False
    piece = json.loads(line.removeprefix("data: "))
    if "choices" in piece:
        choice = piece["choices"][0]
        return bool(choice.get("text") or choice.get("delta", {}).get("content"))
    return bool(piece.get("delta") or piece.get("message", {}).get("content"))


def main(given: Sequence[str] | None = None) -> None:
    """Print the times of each interface, write the bench's result file, and fail beyond 0.5 s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, httpx.Client(timeout=300) as http:
        command = [sys.executable, "-m", "kvell.cli.main", "serve", "smollm2"]
        command += [f"--port={port}", "--kv-memory=512MiB"]
        server = SystemProcess(command, Path(folder, "server.log"), {})
        try:
            server.wait_for(f"{url}/health", START_SECONDS)
            start = 1000
            figures: dict[str, list[dict[str, float]]] = {path: [] for path in PATHS}
            for _ in range(args.rounds):
                for path in PATHS:
                    text = text_of(http, url, start, args.tokens)
                    start += 10_000
                    figures[path].append(stream_times(http, f"{url}{path}", body_of(path, text)))
        finally:
            server.end()
    for path, times in figures.items():
        shown = ", ".join(f"{each['headers']:.3f} of {each['first_piece']:.1f}" for each in times)
        print(f"{path:22} headers of first piece, s: {shown}")
    result_file.write(args.out or result_file.path_of("server_headers"), figures)
    slowest = max(each["headers"] for times in figures.values() for each in times)
    if slowest > MOST_HEADER_SECONDS:
        sys.exit(f"headers came after {slowest:.3f} s; at most {MOST_HEADER_SECONDS} s")


if __name__ == "__main__":
    main()
