"""A server whose instances have roles."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from tests.llm.servers import PATIENCE_SECONDS


@dataclass(frozen=True)
class Server:
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def instances(self) -> dict[str, dict[str, Any]]:
        told = httpx.get(f"{self.url}/cluster", timeout=60).json()["instances"]
        return {one["id"]: one for one in told}

    def counted(self, name: str, instance: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        rows = re.findall(rf"^kvell:{name}\{{(.*)\}} (\S+)$", page, re.MULTILINE)
        return sum(float(value) for labels, value in rows if f'instance="{instance}"' in labels)

    def is_clean(self) -> bool:
        clean: bool = httpx.get(f"{self.url}/debug/audit", timeout=60).json()["clean"]
        return clean


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
