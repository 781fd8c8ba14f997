"""The treatment of nulls, unknown fields and unsupported fields in all request bodies.

Unknown fields are logged and ignored.  A field that other servers support is accepted if its value
requests the default behaviour, and otherwise refused by name (:mod:`.other_fields`).
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType, NoneType
from typing import ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator

from kvell.equivalents.other import Other
from kvell.errors import ChangeSomething

LONGEST_VALUE = 64


class RequestPart(BaseModel):
    """A part of a request body: null means the default, ``model_extra`` has unknown fields.

    :cvar others: unsupported fields of other servers, by name.
    :cvar place: prefix of the part's fields in errors, such as ``options.``.
    """

    model_config = ConfigDict(extra="allow")
    others: ClassVar[Mapping[str, Other]] = MappingProxyType({})
    place: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, data: object, check: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop nulls of optional fields that cannot be null, and refuse unsupported fields that
        would change the answer.

        :raises ChangeSomething: naming the field.
        """
        if isinstance(data, dict) and None in data.values():
            fields = cls.model_fields
            names = {field.alias or name: field for name, field in fields.items()}
            data = {
                name: value
                for name, value in data.items()
                if value is not None
                or name not in names
                or NoneType in get_args(names[name].annotation)
                or names[name].is_required()
            }
        part = check(data)
        for name, value in (part.model_extra or {}).items():
            other = part.others.get(name)
            if other is not None and not other.is_taken(value):
                shown = value if isinstance(value, bool | int | float | str) else "…"
                shown = f"{shown}"[:LONGEST_VALUE]
                raise ChangeSomething(part.place + name, shown, "is not served", other.remedy)
        return part


class RequestBody(RequestPart):
    """A request body.

    :cvar names: patterns of fields of the translated request, and the client's names of them.
    """

    names: ClassVar[Iterable[tuple[re.Pattern[str], str]]] = ()
    model: str | None = None
    """Name of a served model; the first one if null."""

    def name_sent(self, field: str) -> str:
        """Return the client's name of a field of the request that the body is translated to."""
        for pattern, name in self.names:
            if match := pattern.match(field):
                return match.expand(name) + field[match.end() :]
        return field

    def unknown_fields(self) -> set[str]:
        """Return the paths of unknown fields, such as ``stream_options.colour``.

        Elements of a list share a path: ``messages[].content[].colour``.
        """
        names: set[str] = set()
        pending: list[tuple[object, str]] = [(self, "")]
        while pending:
            value, path = pending.pop()
            if isinstance(value, list):
                if value and isinstance(value[0], BaseModel):  # a prompt may be a million numbers
                    pending += [(element, f"{path}[]") for element in value]
            elif isinstance(value, BaseModel):
                before = f"{path}." if path else ""
                others = value.others if isinstance(value, RequestPart) else ()
                names.update(
                    before + name for name in value.model_extra or () if name not in others
                )
                for name in value.model_fields_set & type(value).model_fields.keys():
                    if isinstance(part := getattr(value, name), list | BaseModel):
                        pending.append((part, before + name))
        return names
