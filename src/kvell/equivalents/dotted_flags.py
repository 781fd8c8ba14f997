"""vLLM's dotted flags: ``--speculative-config.method ngram`` is a field of a JSON object."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json

MOST_LEVELS = 16


def with_fields_as_json(
    args: Sequence[str], taken: Callable[[str], Literal["", "value", "json"]]
) -> list[str]:
    """Return words in which the dotted fields of a flag are one JSON object, at the first's place.

    A name that ends with ``+`` appends to a list.

    :param taken: returns what a flag takes; "" for nothing.
    :raises ChangeSomething: for a field without a value, or inside a value that is no object.
    """
    words: list[str] = []
    objects: dict[str, dict[str, object]] = {}
    places: dict[str, int] = {}
    rest = iter(args)
    for word in rest:
        if word == "--":
            return _placed([*words, word, *rest], objects, places)
        name, mark, value = word.partition("=")
        flag, dot, path = name.partition(".")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if not dot or taken(flag) != "json":
            words.append(word)
            if not mark and taken(flag):
                words += [given for given in (next(rest, None),) if given is not None]
            continue
        text = value if mark else next(rest, None)
        if text is None:
            raise ChangeSomething(name, "nothing", "needs a value", "give one, or leave it out")
        if flag not in objects:
            objects[flag] = {}
            places[flag] = len(words)
            words += [flag, ""]
        _put(objects[flag], path.split("."), _value(text), name)
    return _placed(words, objects, places)


def _placed(
    words: list[str], objects: Mapping[str, dict[str, object]], places: Mapping[str, int]
) -> list[str]:
    for flag, place in places.items():
        words[place + 1] = json.dumps(objects[flag])
    return words


def _put(fields: dict[str, object], path: Sequence[str], value: object, name: str) -> None:
    *parents, last = path
    if len(path) > MOST_LEVELS or not all(path):
        raise ChangeSomething(name, value, "does not name a field", "write --flag.field VALUE")
    for parent in parents:
        inner = fields.setdefault(parent, {})
        if not isinstance(inner, dict):
            remedy = "give its fields, or its value"
            raise ChangeSomething(name, value, f"{parent} has a value already", remedy)
        fields = inner
    if not last.endswith("+"):
        fields[last] = value
        return
    items = fields.setdefault(last[:-1], [])
    if not isinstance(items, list):
        raise ChangeSomething(name, value, "is not a list", "leave out the +")
    items.append(value)


def _value(text: str) -> object:
    try:
        return decode_json(text)
    except MalformedError:
        return text
