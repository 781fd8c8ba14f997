"""Models by the names of requests, with or without a tag of Ollama's: ``NAME:latest``."""

import re
from collections.abc import Callable, Collection

from kvell.server.api.http_errors import MODELS, UnknownModel

LATEST = ":latest"
"""The tag that Ollama's clients add to a model's name."""
LONGEST_NAME = 200
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([kmbt])", re.IGNORECASE)
_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
NOMINAL_PERCENT = 20
"""How far a model's numbers may be from the size in its name: Qwen2.5-7B has 7.6 billion."""


def served_name(name: str, names: Collection[str], parameters: Callable[[str], int]) -> str:
    """Return the name under which a model is served.

    :param name: one of ``names``, alone or with the tag ``latest`` or that of its size.
    :param parameters: returns the numbers in the weights of the model of a name; 0 if unknown.
    :raises UnknownModel: if no model has the name, or its model has another size.
    """
    if name in names:
        return name
    bare, mark, tag = name.rpartition(":")
    shown = name[:LONGEST_NAME]
    if mark and bare in names:
        count = parameters(bare)
        if mark + tag == LATEST or is_size(tag, count):
            return bare
        is_another = count and _SIZE.fullmatch(tag)
        why = f"has {human_number(count)} parameters" if is_another else "has no such tag"
        raise UnknownModel(f"model={shown}: is not served: {bare} {why}; use {bare}")
    raise UnknownModel(f"model={shown}: is not served; use {', '.join(names)} (see {MODELS})")


def is_size(tag: str, parameters: int) -> bool:
    """Return whether a tag such as ``135m`` is the nominal size of a model.

    :param parameters: numbers in its weights; 0 if unknown.
    """
    match = _SIZE.fullmatch(tag)
    if match is None:
        return False
    nominal = float(match[1]) * _UNITS[match[2].lower()]
    return 100 * abs(parameters - nominal) <= NOMINAL_PERCENT * nominal


def human_number(number: int) -> str:
    """Return a number of parameters as Ollama writes it: ``134.52M``."""
    for unit, size, form in (("B", 10**9, ".1f"), ("M", 10**6, ".2f")):
        if number >= size:
            return f"{number / size:{'.0f' if number % size == 0 else form}}{unit}"
    return f"{number / 1000:.0f}K" if number >= 1000 else str(number)
