"""Arguments of vLLM's and SGLang's classes, translated into settings of Kvell."""

import logging
import re
from collections.abc import Mapping
from functools import partial

from kvell.byte_sizes import parse_bytes
from kvell.equivalents.table import argument_words, equivalent, kvell_value
from kvell.errors import ChangeSomething
from kvell.flags import Flag

logger = logging.getLogger(__name__)

FLAG = re.compile(r"--([a-z][a-z-]+) ([\w.]+(?:[=,][\w.=]+)*)")
"""A flag and its value in a remedy."""
SIZES = frozenset(("--kv-memory", "--memory", "--cpu-buffer"))


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
        if value is None and equivalent(f"--{name}") is not None:
            continue
        try:
            translation = argument_words(name, value)
        except ChangeSomething as error:
            remedy = FLAG.sub(partial(_as_argument, owner, flags), error.remedy)
            raise ChangeSomething(name, value, error.problem, remedy) from error
        if translation is None:
            own[name] = value
            continue
        words, note = translation
        entry = equivalent(f"--{name}")
        if note:
            logger.warning("%s: %s", owner, note)
        for flag, text in words:
            setting, switched_on = _setting(flag, flags)
            if setting is None and entry is not None and entry.in_class:
                continue
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
    for setting, flag in flags.values():
        if flag.name == name or (flag.kind == "switch" and flag.opposite == name):
            return setting, flag.name == name
    return None, False


def _as_argument(owner: str, flags: Mapping[str, tuple[str, Flag]], match: re.Match[str]) -> str:
    """Return a flag of a remedy as an argument; instances are those of ``AsyncEngine``."""
    flag = f"--{match[1]}"
    value = match[2]
    if flag == "--instances":
        argument = f'instances="{value}"'
        return argument if owner == "AsyncEngine" else f"AsyncEngine({argument})"
    if flag in SIZES:
        return f'{match[1].replace("-", "_")}="{value}"'
    return f'{flags[flag][0]}="{value}"' if flag in flags else f"kvell serve {match[0]}"


def _parse(name: str, text: str, flag: Flag) -> object:
    """Return the value of a flag's text; a text that does not suit is returned as it is."""
    if flag.kind == "bytes":
        return parse_bytes(text, name)
    if flag.kind == "number":
        return float(text)
    return int(text) if text.isdecimal() else text
