"""Flags of vLLM, SGLang and llama.cpp, and what Kvell does with each.

The command line, :class:`kvell.LLM`, :class:`kvell.AsyncEngine` and ``docs/equivalents.md`` use
these entries, which ``equivalents.json`` has.  An entry is honoured (translated to flags of Kvell),
accepted (Kvell does it anyway), or refused; the latter two say why.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from kvell.equivalents.entry import OtherCommand, System, Words, refusal
from kvell.equivalents.translations import (
    at_most,
    chunk,
    context,
    draft_words,
    gibibytes,
    instances,
    structured_words,
)
from kvell.wire.decoding import decode_packaged

MOST_LOGPROBS = 20
"""The most log probabilities at a token that a request may ask for."""
_TRANSLATIONS: Mapping[str, Callable[[str], Words]] = {
    "--max-logprobs": at_most("--max-logprobs", MOST_LOGPROBS),
    "--data-parallel-size": instances,
    "--speculative-config": draft_words,
    "--kv-offloading-size": gibibytes("--kv-offloading-size"),
    "--swap-space": gibibytes("--swap-space"),
    "--guided-decoding-backend": structured_words,
    "--disable-log-stats": lambda _: (("--stats-seconds", "0"),),
    "--chunked-prefill-size": chunk,
    "--ctx-size": context,
}
"""Translations of values by the first name of a flag; other flags have another name in Kvell."""


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A flag of another system, and what Kvell does with it.

    :param names: the flag's names, the longest first.
    :param renamed: Kvell's name of the flag, if it is another one; "" if there is none.
    :param accepts: values that are accepted; None for all. Others are refused.
    :param in_class: reason why a class without the flags of the translation accepts it; "" if it
        refuses it.
    :param is_json: whether the value is a JSON object, of which ``--flag.field`` is one field.
    """

    names: tuple[str, ...]
    sentence: str
    takes_value: bool = True
    renamed: str = ""
    accepts: frozenset[str] | None = None
    system: System = "vLLM"
    in_class: str = ""
    is_json: bool = False

    @property
    def translate(self) -> Callable[[str], Words] | None:
        """The translation of values into flags of Kvell; None if no value needs a flag."""
        if self.renamed:
            return lambda value: ((self.renamed, value if self.takes_value else None),)
        return _TRANSLATIONS.get(self.names[0])

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


class _File(msgspec.Struct, forbid_unknown_fields=True):
    flags: tuple[Equivalent, ...]
    values: dict[str, dict[str, str]]
    refused_values: dict[str, dict[str, str]]
    commands: dict[str, OtherCommand]


_FILE = decode_packaged(_File, "kvell.equivalents", "equivalents.json")
EQUIVALENTS = _FILE.flags
_BY_NAME = {name: entry for entry in EQUIVALENTS for name in entry.names}
VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(_FILE.values)
"""Other systems' names of values, by flag, and Kvell's."""
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(_FILE.refused_values)
"""Other systems' values that Kvell refuses, by flag, and why."""
OTHER_COMMANDS: Mapping[str, OtherCommand] = MappingProxyType(_FILE.commands)
"""Commands of Ollama and vLLM by name, and what does the same."""


def equivalent(flag: str) -> Equivalent | None:
    """Return the entry of a flag, ``--name`` or ``-n``; None if no entry has it."""
    return _BY_NAME.get(flag.replace("_", "-") if flag.startswith("--") else flag)


def kvell_value(flag: str, value: str) -> str:
    """Return Kvell's name of a flag's value.

    :raises ChangeSomething: if Kvell refuses the value.
    """
    if sentence := REFUSED_VALUES.get(flag, {}).get(value):
        raise refusal(flag, value, sentence)
    return VALUES.get(flag, {}).get(value, value)


def argument_words(name: str, value: object) -> tuple[Words, str] | None:
    """Return the flags of Kvell for an argument of vLLM's ``LLM``, and a note, or None.

    :param name: like ``gpu_memory_utilization``.
    :return: None if no entry has the name.
    :raises ChangeSomething: if the argument, or its value, is refused.
    """
    entry = equivalent(f"--{name}")
    if entry is None:
        return None
    if value is False and not entry.takes_value:
        return (), ""
    if entry.is_json and entry.translate and isinstance(value, Mapping):
        return entry.translate(json.dumps(dict(value))), ""
    return entry.words(str(value) if entry.takes_value else ""), entry.note


def words_of(words: Words) -> list[str]:
    return [word for pair in words for word in pair if word is not None]
