"""Values of options from a YAML file and from ``KVELL_…`` variables."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from kvell.equivalents.entry import Words, nearest
from kvell.equivalents.table import equivalent, kvell_value
from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json, read_bounded

PREFIX = "KVELL_"
MAX_YAML_BYTES = 64 << 10
Options = Mapping[str, click.Option]
Values = dict[str, object]
Origins = dict[str, str]
"""The place of a value, by the name of its parameter, for messages."""


def variable_of(flag: str) -> str:
    return PREFIX + flag.lstrip("-").replace("-", "_").upper()


def with_variables(
    environ: Mapping[str, str], options: Options, values: Values, origins: Origins
) -> tuple[Values, Origins]:
    """Return the values with those of variables, which replace values of a file."""
    values, origins = dict(values), dict(origins)
    for name, option in options.items():
        variable = variable_of(name)
        text = environ.get(variable)
        if text and name in option.opts and option.name and option.expose_value:
            text = kvell_value(name, text)
            values[option.name] = _several(text) if option.multiple else text
            origins[option.name] = variable
    return values, origins


def with_file(path: str | None, options: Options, notes: list[str]) -> tuple[Values, Origins]:
    """Return the values of a YAML file, whose keys are flags without their dashes.

    :param notes: lines about keys without effect are appended.
    :raises ChangeSomething: if the file, or a key of it, is not understood.
    """
    values: Values = {}
    origins: Origins = {}
    for key, value in _read(path).items() if path is not None else ():
        origin = f"{path}: {key}"
        for flag, text in _words(key, value, notes):
            option = options.get(flag)
            if option is None or not option.name or flag == "--config":
                close = nearest(flag, options)
                remedy = f"use {close[0][2:]}" if close else "see --help-all for all flags"
                raise ChangeSomething(origin, value, "is not a flag of this command", remedy)
            chosen: object = flag in option.opts if text is None else text
            values[option.name] = chosen if not option.multiple else [*_items(chosen)]
            origins[option.name] = origin
    return values, origins


def _words(key: str, value: object, notes: list[str]) -> "Words | list[tuple[str, object]]":
    flag = "--" + key.replace("_", "-")
    if isinstance(value, Mapping):
        value = json.dumps(value)
    entry = equivalent(flag)
    if entry is not None:
        if value is False and not entry.takes_value:
            return []
        if entry.note:
            notes.append(entry.note)
        return entry.words(str(value))
    if isinstance(value, bool):
        return [(flag if value else f"--no-{key.replace('_', '-')}", None)]
    return [(flag, value if isinstance(value, list) else kvell_value(flag, str(value)))]


def _read(path: str) -> Mapping[str, object]:
    """Read a YAML file of keys and values.

    :raises ChangeSomething: if there is no such file, or it is not a mapping.
    """
    # Imported here: most commands read no YAML.
    import yaml

    try:
        text = read_bounded(Path(path), MAX_YAML_BYTES).decode()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            problem = "refers to a value by an alias, which is not read"
            raise ChangeSomething("--config", path, problem, "write the value itself")
        given = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is not text"
        raise ChangeSomething("--config", path, f"cannot be read ({why})", "give a file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"is not YAML ({' '.join(str(error).split())})"
        raise ChangeSomething("--config", path, problem, "write lines like port: 8000") from error
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        problem = "is not a mapping of flags to values"
        raise ChangeSomething("--config", path, problem, "write lines like port: 8000")
    return given


def _several(text: str) -> list[str]:
    try:
        given = decode_json(text)
    except MalformedError:
        given = text
    return [str(item) for item in given] if isinstance(given, list) else [text]


def _items(chosen: object) -> Iterator[str]:
    for item in chosen if isinstance(chosen, list) else [chosen]:
        yield str(item)
