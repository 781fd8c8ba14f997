"""Settings from the keyword arguments of a Python class, with errors that name the class."""

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Real
from operator import index
from types import MappingProxyType
from typing import SupportsIndex, TypeGuard

from kvell.byte_sizes import parse_bytes
from kvell.engine.setup.arguments.equivalent_arguments import own_value, with_equivalents
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.equivalents.other import unknown_argument
from kvell.errors import ChangeSomething, UnknownArgument
from kvell.flags import Flag, settings_with_flag

SIZES = MappingProxyType(
    {
        "kv_memory": "kv_memory_bytes",
        "memory": "memory_bytes",
        "cpu_buffer": "cpu_buffer_bytes",
        "weight_cache_size": "weight_cache_size_bytes",
    }
)
"""Settings in bytes by their other names, which also take a text like ``256MiB``."""
_SETTINGS = frozenset(field.name for field in fields(EngineSettings))
_FLAGS = {flag.name: (field.name, flag) for field, flag in settings_with_flag(EngineSettings)}
"""Settings by their flags."""


def settings_from(
    owner: type,
    model: str | os.PathLike[str] | EngineSettings,
    arguments: Mapping[str, object],
) -> EngineSettings:
    """Return the settings that keyword arguments of a class give.

    :param model: a model, or an object with all settings; then no argument may be given.
    :param owner: the class, for errors; its constructor's parameters are known names, too.
    :raises UnknownArgument: naming an argument that does not exist, and the nearest one that does.
    :raises ChangeSomething: naming an argument whose value cannot be used.
    """
    given, names = dict[str, object](), dict[str, str]()
    for name, value in with_equivalents(owner.__name__, arguments, _FLAGS).items():
        setting = SIZES.get(name, name)
        if setting not in _SETTINGS:
            raise _unknown(owner, name, value)
        if value is None:
            continue  # as in vLLM: the default
        if name not in SIZES:
            given[setting], names[setting] = value, name
        elif value is not None:
            if arguments.get(setting) is not None:
                remedy = f"give {name} or {setting}"
                raise ChangeSomething(name, value, f"is given as {setting}, too", remedy)
            given[setting] = parse_bytes(value, name) if isinstance(value, str) else value
            names[setting] = name
    for field, flag in settings_with_flag(EngineSettings):
        if field.name in given and (given[field.name] is not None or field.default is not None):
            given[field.name] = own_value(names[field.name], given[field.name], flag)
            _check(names[field.name], given[field.name], flag)
    _check_models(given.get("beside", ()))
    if isinstance(model, EngineSettings):
        for name, value in given.items():
            problem = "is given next to an object with all settings"
            raise ChangeSomething(name, value, problem, "set it in that object")
        return model
    return EngineSettings(_model(model), **given)  # type: ignore[arg-type] # checked above


def _unknown(owner: type, name: str, value: object) -> UnknownArgument:
    parameters = inspect.signature(owner).parameters.values()
    own = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    return unknown_argument(owner.__name__, name, value, _SETTINGS | SIZES.keys() | own)


def _model(model: object) -> str:
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if not isinstance(model, str) or not model:
        remedy = "use smollm2, a transformers directory, a GGUF file, or a hub id"
        raise ChangeSomething("model", model, "is not the name of a model", remedy)
    return model


def _check_models(beside: object) -> None:
    names = beside if isinstance(beside, Sequence) and not isinstance(beside, str) else [None]
    if not all(isinstance(name, str) for name in names):
        problem, remedy = "is not a list of models", 'write it like ["smollm2"]'
        raise ChangeSomething("beside", beside, problem, remedy)


def _check(name: str, value: object, flag: Flag) -> None:
    """Check that a value suits the flag of its setting.

    :raises ChangeSomething: naming the argument.
    """
    match flag.kind:
        case "switch":
            is_valid = isinstance(value, bool)
            problem = "is not a bool"
            remedy = "use True or False"
        case "text":
            # The JSON object of --hf-overrides may be a mapping here.
            is_valid = isinstance(value, str) or (
                flag.metavar == "JSON" and isinstance(value, Mapping)
            )
            is_valid = is_valid and (not flag.choices or value in flag.choices)
            problem = "is not served" if flag.choices else "is not a text"
            remedy = f"use one of {', '.join(flag.choices)}" if flag.choices else "give a text"
        case "seconds":
            is_valid = _is_number(value) and math.isfinite(value) and value > 0
            problem, remedy = "is not a number of seconds above 0", "give one, or leave it out"
        case "number":
            least = flag.least or 0.0
            most = math.inf if flag.most is None else flag.most
            is_valid = _is_number(value) and least < value <= most
            problem, remedy = f"is not a number above {least:g}", f"give one up to {most:g}"
        case "bytes":
            is_valid = _is_whole(value, 1)
            problem = "is not a number of bytes above 0"
            remedy = f'give one, or {name.removesuffix("_bytes")}="512MiB"'
        case _:
            least = 1 if flag.least is None else int(flag.least)
            is_valid = _is_whole(value, least)
            problem = f"is not a whole number from {least}"
            remedy = "give one, or leave it out"
    if not is_valid:
        raise ChangeSomething(name, value, problem, remedy)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object, least: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return False
    return index(value) >= least
