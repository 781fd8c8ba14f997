"""What all request bodies have in common: nulls, and fields that are not their own.

A field that nobody knows is ignored and told in the log.  A field that other servers know and this
one does not serve is taken where it asks for what happens anyway, and refused by its name otherwise
(:mod:`.other_fields`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType, NoneType
from typing import ClassVar, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.other_fields import Other

LONGEST_VALUE = 64


class RequestPart(BaseModel):
    """A part of a request body: a null means the default, and fields of no meaning are kept apart.

    They are pydantic's ``model_extra``.
    """

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        """Null in a field that cannot be null means that it was not sent."""
        if not isinstance(data, dict) or None not in data.values():
            return data
        fields = cls.model_fields
        names = {field.alias or name: field for name, field in fields.items()}
        return {
            name: value
            for name, value in data.items()
            if value is not None
            or name not in names
            or NoneType in get_args(names[name].annotation)
            or names[name].is_required()
        }


class RequestBody(RequestPart):
    """A request body.

    :cvar others: the fields that other servers know and this one does not serve, by name.
    """

    others: ClassVar[Mapping[str, Other]] = MappingProxyType({})

    model: str | None = None
    """Name of a served model; the first one if null."""

    @model_validator(mode="after")
    def _refuse_others(self) -> "RequestBody":
        """Refuse by name what changes an answer and is not served.

        :raises ChangeSomething: naming the field.
        """
        for name, value in (self.model_extra or {}).items():
            other = self.others.get(name)
            if other is not None and not other.is_taken(value):
                shown = value if isinstance(value, bool | int | float | str) else "…"
                shown = f"{shown}"[:LONGEST_VALUE]
                raise ChangeSomething(name, shown, "is not served", other.remedy)
        return self

    def unknown_fields(self) -> set[str]:
        """Names of the fields that nobody knows, as paths: ``stream_options.colour``.

        Elements of a list are one path: ``messages[].content[].colour``.
        """
        return {name for name in _extras(self, "") if name not in self.others}


def renamed(field: str, names: Iterable[tuple[re.Pattern[str], str]]) -> str:
    """What a body calls a field of the request that it is answered as.

    :param names: patterns of the beginnings of fields, and what stands here in their place.
    """
    for pattern, name in names:
        if found := pattern.match(field):
            return found.expand(name) + field[found.end() :]
    return field


def _extras(value: object, path: str) -> Iterator[str]:
    """Paths of the fields that no model has, in a value of a model."""
    if isinstance(value, list):
        for one in value:
            if not isinstance(one, BaseModel):
                return  # lists are of one kind, and a prompt of a million numbers is one
            yield from _extras(one, f"{path}[]")
    elif isinstance(value, BaseModel):
        before = f"{path}." if path else ""
        for name in value.model_extra or ():
            yield before + name
        for name in value.model_fields_set:
            if name in type(value).model_fields:
                yield from _extras(getattr(value, name), before + name)
