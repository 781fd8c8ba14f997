"""A flag of another system, and what Kvell does with it."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvell.errors import ChangeSomething

Words = tuple[tuple[str, str | None], ...]
"""Flags of Kvell and their values; None for a switch."""
System = Literal["vLLM", "SGLang", "llama.cpp", "Ollama"]


def refusal(flag: str, value: object, sentence: str) -> ChangeSomething:
    problem, _, remedy = sentence.partition("; ")
    return ChangeSomething(flag, value if value != "" else "on", problem, remedy or "leave it out")


@dataclass(frozen=True)
class OtherCommand:
    """A command of another system."""

    problem: str
    remedy: str
    system: System = "Ollama"

    def refusal(self, name: str) -> ChangeSomething:
        return ChangeSomething("command", name, f"is {self.system}'s: {self.problem}", self.remedy)


NEAR = 0.8
"""The least similarity, from 0 to 1, of a name that is worth a mention."""


def nearest(name: str, names: Iterable[str], least: float = NEAR) -> list[str]:
    """Return at most one of the names, if it is near: a slip of the finger, not another word."""
    return difflib.get_close_matches(name, sorted(names), 1, least)
