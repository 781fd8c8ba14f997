import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai


def seconds_of(text: str) -> float:
    found = re.fullmatch(r"(?:(\d+)m)?(?:([\d.]+)s)?|(\d+)ms", text)
    assert found is not None, text
    minutes, seconds, milliseconds = (float(part or 0) for part in found.groups())
    return minutes * 60 + seconds + milliseconds / 1000


KEYS = """
[[keys]]
name = "red"
key = "red-1"

[[keys]]
name = "red"
key = "red-2"

[[keys]]
name = "blue"
key = "blue-1"

[[keys]]
name = "small"
key = "small-1"
requests_per_minute = 5
tokens_per_minute = 1000

[[keys]]
name = "slow"
key = "slow-1"
requests_per_minute = 2
tokens_per_minute = 60

[[keys]]
name = "ops"
key = "ops-1"
operator = true
"""

PROMPT = "the secret of all tenants"


class Keyed:
    def __init__(self, process: "subprocess.Popen[str]", key_file: Path) -> None:
        self.process, self.key_file = process, key_file
        self.seen: list[dict[str, Any]] = []
        self.url = self.line("server_started")["url"]

    def line(self, event: str, **fields: object) -> dict[str, Any]:
        """The next line of the log about an event that has these fields."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            line: dict[str, Any] = json.loads(text)
            self.seen.append(line)
            if line["event"] == event and fields.items() <= line.items():
                return line
        raise AssertionError(f"the log ended without {event} {fields}")

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def cached_tokens(self, key: str, salt: str | None = None, prompt: str = PROMPT) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        with self.client(key) as client:
            reply = client.completions.create(
                model="fake", prompt=prompt, max_tokens=2, extra_body=extra
            )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    def post(self, key: str, **fields: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/completions", json=fields, headers=headers, timeout=30)


@contextlib.contextmanager
def keyed_server(folder: Path, *instance: str) -> Iterator[Keyed]:
    key_file = folder / "keys.toml"
    key_file.write_text(KEYS)
    key_file.chmod(0o600)
    script = str(Path(__file__).with_name("keyed_server.py"))
    command = [sys.executable, script, str(key_file), *instance]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Keyed(process, key_file)
        finally:
            process.terminate()
            process.wait(timeout=20)
