"""Journals, plans and actions as plain values, so that a recording outlives the classes.

A record is ``{"is": its class, field: value}`` without fields that have their defaults.  A class
that changes its fields keeps its old form here: :data:`DESCRIBES` and :data:`RESTORES` translate.
"""

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from kvell.engine.core import journal
from kvell.engine.core.lateness import Lateness
from kvell.engine.failing.failures import StepFailure
from kvell.engine.moving.encoding import Handover
from kvell.engine.protocol import logprobs, messages, placements, request_spec, sampling_params
from kvell.engine.requests import plan
from kvell.mempool import entries
from kvell.mempool.loans import messages as loans
from kvell.mempool.transfers import messages as transfers

Plain = Any
"""None, numbers, text, bytes, lists (of tuples), and dictionaries of these."""

MODULES = (
    *(journal, messages, placements, request_spec, sampling_params, logprobs, plan),
    *(entries, loans, transfers),
)
CLASSES: dict[str, Any] = {
    name: kind
    for module in MODULES
    for name, kind in vars(module).items()
    if isinstance(kind, type)
} | {kind.__name__: kind for kind in (Lateness, StepFailure, Handover)}
PRIVATE = ("private", "announced")
"""Fields of messages with bytes of the engine: encoded records, which are described too."""


def _described_submit(command: messages.Submit) -> Plain:
    made = described_fields(command, _names(command) or {})
    spec = made.pop("spec")
    return made | {name: part for name, part in spec.items() if name not in ("is", "session")}


def _restored_submit(parts: dict[str, Any]) -> messages.Submit:
    names = request_spec.RequestSpec.__struct_fields__
    spec = request_spec.RequestSpec(**{name: parts.pop(name) for name in names if name in parts})
    return messages.Submit(spec, **parts)


def _described_work(work: plan.TokenWork) -> Plain:
    """Describe work that had the fields of its request that a step reads."""
    made, spec = described_fields(work, _names(work) or {}), work.spec
    del made["spec"]
    made["request_id"] = spec.request_id
    made["sampling"] = described(spec.sampling) if made.pop("samples") else None
    extra = {
        "images": spec.images,
        "image_ids": spec.image_ids,
        "prompt_tokens": spec.prompt_tokens,
        "model": spec.model,
        "scores": work.scores,
    }
    usual: tuple[Any, ...] = ((), "", None)
    return made | {name: described(part) for name, part in extra.items() if part not in usual}


DESCRIBES: dict[type, Callable[[Any], Plain]] = {
    messages.Submit: _described_submit,
    plan.TokenWork: _described_work,
}
RESTORES: dict[str, Callable[[dict[str, Any]], Any]] = {"Submit": _restored_submit}


def described(value: Any) -> Plain:
    if type(value) in DESCRIBES:
        return DESCRIBES[type(value)](value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, list(value.shape), value.tobytes()]}
    names = _names(value)
    if names is not None:
        return described_fields(value, names)
    if isinstance(value, tuple):
        return [described(part) for part in value]
    if isinstance(value, list):
        return {"list": [described(part) for part in value]}
    if isinstance(value, Mapping):
        return {"map": [[described(key), described(part)] for key, part in value.items()]}
    raise TypeError(f"{type(value)} has no description")


def described_fields(value: Any, names: Mapping[str, Any]) -> dict[str, Plain]:
    made: dict[str, Plain] = {"is": type(value).__name__}
    for name, default in names.items():
        part = getattr(value, name)
        if _is(part, default):
            continue
        made[name] = (
            _opened(part) if name in PRIVATE and isinstance(part, bytes) else described(part)
        )
    return made


def restored(value: Plain) -> Any:
    if isinstance(value, list):
        return tuple(restored(part) for part in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        dtype, shape, data = value["array"]
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
    if "list" in value:
        return [restored(part) for part in value["list"]]
    if "map" in value:
        return {restored(key): restored(part) for key, part in value["map"]}
    if "encoded" in value:
        return msgspec.msgpack.encode(restored(value["encoded"]))
    parts = {name: restored(part) for name, part in value.items() if name != "is"}
    make = RESTORES.get(value["is"])
    return CLASSES[value["is"]](**parts) if make is None else make(parts)


def _opened(data: bytes) -> Plain:
    """Return the record that private bytes encode, or the bytes."""
    for kind in (messages.Submit, Handover):
        try:
            return {"encoded": described(msgspec.msgpack.decode(data, type=kind))}
        except (msgspec.MsgspecError, ValueError):
            continue
    return data


def _names(value: Any) -> dict[str, Any] | None:
    """Return the default of each field of a record; None if the value is no record."""
    if isinstance(value, msgspec.Struct):
        return {
            field.name: _default(field.default, field.default_factory, msgspec.NODEFAULT)
            for field in msgspec.structs.fields(value)
        }
    if dataclasses.is_dataclass(value):
        return {
            field.name: _default(field.default, field.default_factory, dataclasses.MISSING)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        defaults = getattr(value, "_field_defaults", {})
        return {name: defaults.get(name, _NONE) for name in type(value).__annotations__}
    return None


_NONE = object()


def _default(value: Any, factory: Any, missing: Any) -> Any:
    if value is not missing:
        return value
    return factory() if factory is not missing else _NONE


def _is(part: Any, default: Any) -> bool:
    if isinstance(part, np.ndarray) or isinstance(default, np.ndarray):
        same = isinstance(part, np.ndarray) and isinstance(default, np.ndarray)
        return same and part.dtype == default.dtype and np.array_equal(part, default)
    return type(part) is type(default) and bool(part == default)
