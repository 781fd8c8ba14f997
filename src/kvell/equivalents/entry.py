"""A flag of another system, and what Kvell does with it."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kvell.errors import ChangeSomething

Words = tuple[tuple[str, str | None], ...]
"""Flags of Kvell and their values; None for a switch."""
System = Literal["vLLM", "SGLang", "llama.cpp", "Ollama"]


@dataclass(frozen=True)
class Equivalent:
    """A flag of another system, and what Kvell does with it.

    :param names: the flag's names, the longest first.
    :param sentence: what Kvell has or does instead.
    :param takes_value: whether a value follows the flag.
    :param translate: returns flags of Kvell for a value; None if no flag is needed for any value.
    :param accepts: values that are accepted; None for all. Others are refused.
    :param system: a system with this flag.
    :param in_class: reason why a class without the flags of the translation accepts it; "" if it
        refuses it.
    :param is_json: whether the value is a JSON object, of which ``--flag.field`` is one field.
    """

    names: tuple[str, ...]
    sentence: str
    takes_value: bool = True
    translate: Callable[[str], Words] | None = None
    accepts: frozenset[str] | None = None
    system: System = "vLLM"
    in_class: str = ""
    is_json: bool = False

    @property
    def action(self) -> Literal["honoured", "accepted", "refused"]:
        if self.translate is not None:
            return "honoured"
        return "refused" if self.accepts == frozenset() else "accepted"

    def words(self, value: str, flag: str = "") -> Words:
        """Return the flags of Kvell for a value; "" is the value of a switch.

        :param flag: the name that the user wrote; the first one if "".
        :raises ChangeSomething: if the flag, or this value of it, is refused.
        """
        if self.translate is not None:
            return self.translate(value)
        if self.accepts is not None and value.lower() not in self.accepts:
            raise refusal(flag or self.names[0], value, self.sentence)
        return ()

    @property
    def note(self) -> str:
        """The line for a user whose flag is accepted without effect; "" for other flags."""
        if self.translate is not None:
            return ""
        return f"{self.names[0]} has no effect: {self.sentence.partition('; ')[0]}"


def refusal(flag: str, value: object, sentence: str) -> ChangeSomething:
    problem, _, remedy = sentence.partition("; ")
    return ChangeSomething(flag, value if value != "" else "on", problem, remedy or "leave it out")


NEAR = 0.8
"""The least similarity, from 0 to 1, of a name that is worth a mention."""


def nearest(name: str, names: Iterable[str], least: float = NEAR) -> list[str]:
    """Return at most one of the names, if it is near: a slip of the finger, not another word.

    :param least: the least similarity, from 0 to 1.
    """
    return difflib.get_close_matches(name, sorted(names), 1, least)
