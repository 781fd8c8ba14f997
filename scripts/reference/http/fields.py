"""What fields of HTTP bodies mean: the texts below them in the code, or those of the engine."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

from pydantic import BaseModel

from kvell import SamplingParams
from kvell.server.api.schemas.chat import ChatRequest
from scripts.reference.python.docstrings import below_assignment, parameter_texts


@dataclass(frozen=True)
class FieldText:
    """What is known of a field beside its schema.

    :param default: what the engine takes if the body says nothing; None if the schema says it.
    """

    text: str
    default: object = None


def field_text(model: str, field: str) -> FieldText:
    """Return what a field of a body means, "" if nothing says it.

    Unless its model says otherwise, a field means what a chat request means by its name, or else
    what the sampling parameter of its name means.
    """
    own = _own_text(body_models()[model], field) or _own_text(ChatRequest, field)
    if own:
        return FieldText(own)
    sampling = parameter_texts(SamplingParams.__doc__ or "")
    if field not in sampling:
        return FieldText("")
    default = next(one.default for one in fields(SamplingParams) if one.name == field)
    text = sampling[field]
    shown = default if isinstance(default, float | int) else None
    return FieldText(text[0].upper() + text[1:], shown)


def _own_text(model: type[BaseModel], field: str) -> str:
    for one in model.__mro__:
        name = next(
            (n for n in _names(model, field) if n in vars(one).get("__annotations__", {})), ""
        )
        if name and (text := below_assignment(one.__module__, name, one.__name__)):
            return text
    return ""


def _names(model: type[BaseModel], field: str) -> Iterator[str]:
    """The name of a field in Python: a field may have another one in JSON."""
    yield field
    yield from (name for name, one in model.model_fields.items() if one.alias == field)


@cache
def body_models() -> dict[str, type[BaseModel]]:
    """Return all models of bodies by name."""
    return {one.__name__: one for one in _below(BaseModel) if one.__module__.startswith("kvell.")}


def _below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in model.__subclasses__():
        yield one
        yield from _below(one)
