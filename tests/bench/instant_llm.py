"""Engines that answer at once, for benches that compare two."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class InstantLLM:
    """Answers with a token of its own; notes in ``asked`` that it was asked."""

    def __init__(self, name: str, token: int, asked: list[str]) -> None:
        self._name, self._token, self._asked = name, token, asked

    def generate(self, prompts: Sequence[list[int]], params: Any) -> list[Any]:
        self._asked.append(self._name)
        return [SimpleNamespace(token_ids=[self._token] * params.max_tokens) for _ in prompts]
