"""Arguments of vLLM's and SGLang's classes, translated into settings of Kvell."""

import logging
import re
from collections.abc import Mapping

from kvell.byte_sizes import parse_bytes
from kvell.equivalents.table import argument_words, kvell_value
from kvell.errors import ChangeSomething
from kvell.flags import Flag

logger = logging.getLogger(__name__)

SIZE_FLAG = re.compile(r"--(kv-memory|memory|cpu-buffer) (\w+)")
"""A flag of a size in a remedy, which an argument has as a text."""


def with_equivalents(
    owner: str, arguments: Mapping[str, object], flags: Mapping[str, tuple[str, Flag]]
) -> dict[str, object]:
    """Return the arguments with those of other systems translated; log those without effect.

    :param owner: name of the class that has the arguments.
    :param flags: settings and their flags, by the flag's name.
    :raises ChangeSomething: naming an argument that Kvell refuses, in whole or for its value.
    """
    own: dict[str, object] = {}
    for name, value in arguments.items():
        try:
            translation = argument_words(name, value)
        except ChangeSomething as error:
            remedy = SIZE_FLAG.sub(_as_argument, error.remedy)
            raise ChangeSomething(name, value, error.problem, remedy) from error
        if translation is None:
            own[name] = value
            continue
        words, note = translation
        if note:
            logger.warning("%s: %s", owner, note)
        for flag, text in words:
            setting, switched_on = _setting(flag, flags)
            if setting is None:
                problem = f"needs {flag}, which {owner} does not have"
                raise ChangeSomething(name, value, problem, "leave it out")
            own[setting] = switched_on if text is None else _parse(name, text, flags[flag][1])
    return own


def own_value(name: str, value: object, flag: Flag) -> object:
    """Return Kvell's name of a value of a setting.

    :raises ChangeSomething: naming the argument, if Kvell refuses the value.
    """
    if not isinstance(value, str):
        return value
    try:
        return kvell_value(flag.name, value)
    except ChangeSomething as error:
        raise ChangeSomething(name, value, error.problem, error.remedy) from error


def _setting(name: str, flags: Mapping[str, tuple[str, Flag]]) -> tuple[str | None, bool]:
    """Return the setting of a flag, and whether the flag turns it on."""
    for setting, flag in flags.values():
        if flag.name == name or (flag.kind == "switch" and flag.opposite == name):
            return setting, flag.name == name
    return None, False


def _as_argument(match: re.Match[str]) -> str:
    return f'{match[1].replace("-", "_")}="{match[2]}"'


def _parse(name: str, text: str, flag: Flag) -> object:
    """Return the value of a flag's text; a text that does not suit is returned as it is."""
    if flag.kind == "bytes":
        return parse_bytes(text, name)
    return int(text) if text.isdecimal() else text
