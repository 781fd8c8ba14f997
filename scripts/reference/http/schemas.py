"""Tables of the JSON objects of an OpenAPI document: fields, types, bounds, defaults, meaning."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.reference.http.fields import FieldText, field_text
from scripts.reference.rst import code, table

Schema = Mapping[str, Any]
SCHEMAS = "#/components/schemas/"
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "minProperties": "at least {} names",
    "maxProperties": "at most {} names",
}
"""Words for the bounds that JSON schemas have."""


@dataclass(frozen=True)
class Objects:
    """The named objects of an OpenAPI document, as one page shows them.

    :param page: name of the page; labels of its objects begin with it.
    :param schemas: by name.
    """

    page: str
    schemas: Mapping[str, Schema]

    def label(self, name: str) -> str:
        """Return the label of an object on this page."""
        return f"{self.page}-{name.lower()}"

    def reached(self, schema: Schema) -> list[str]:
        """Return the names of all objects that a schema is made of, in order of appearance."""
        names: list[str] = []
        waiting = list(_references(schema))
        while waiting:
            name = waiting.pop(0)
            if name not in names:
                names.append(name)
                waiting.extend(_references(self.schemas[name]))
        return names

    def fields(self, name: str) -> str:
        """Return the table of an object's fields."""
        schema = self.schemas[name]
        required = schema.get("required", ())
        rows = (
            self._row(name, field, one, field in required)
            for field, one in schema.get("properties", {}).items()
        )
        return table(("Field", "Type", "Default", "Meaning"), (20, 25, 12, 43), rows)

    def _row(self, owner: str, field: str, schema: Schema, is_required: bool) -> tuple[str, ...]:
        text = field_text(owner, field)
        return code(field), self.type_text(schema), _default(schema, text, is_required), text.text

    def type_text(self, schema: Schema) -> str:
        """Return the type of a value with its bounds, for readers."""
        if "$ref" in schema:
            name = schema["$ref"].removeprefix(SCHEMAS)
            return f":ref:`{name} <{self.label(name)}>`"
        choices = schema.get("anyOf", schema.get("oneOf"))
        if choices is not None:
            shown = [self.type_text(one) for one in choices if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(shown))
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            return " or ".join(code(_json(value)) for value in values)
        if schema.get("type") == "array":
            return f"list{_bounds(schema, ' of ')}: {self.type_text(schema.get('items', {}))}"
        return self._plain(schema) + _bounds(schema, ", ")

    def _plain(self, schema: Schema) -> str:
        kind = schema.get("type")
        values = schema.get("additionalProperties")
        if kind == "object" and isinstance(values, Mapping):
            return f"object of {self.type_text(values)}"
        return kind or "anything"


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix(SCHEMAS)
        for key, value in schema.items():
            if key not in ("discriminator", "default"):
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _bounds(schema: Schema, before: str) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f"{before}{_number(schema['minimum'])} to {_number(schema['maximum'])}"
    bounds = [text.format(_number(schema[key])) for key, text in BOUNDS.items() if key in schema]
    return before + ", ".join(bounds) if bounds else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _default(schema: Schema, text: FieldText, is_required: bool) -> str:
    if is_required:
        return "*required*"
    default = schema.get("default", text.default)
    return "" if default is None else code(_json(default))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
