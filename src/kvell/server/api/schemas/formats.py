"""Constraints of an answer's text, in the formats of OpenAI and of vLLM."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvell.engine.protocol.schemas.references import Schema
from kvell.engine.protocol.schemas.strict import StrictPart
from kvell.engine.protocol.structured_outputs import StructuredOutputs, json_text
from kvell.equivalents.arguments import STRUCTURED_OTHERS
from kvell.equivalents.other import check_others
from kvell.errors import ChangeSomething

TAGS = "structural_tag"
"""The type of vLLM's ``response_format`` that Kvell does not serve."""


class JsonSchemaFormat(BaseModel):
    """A schema with a name."""

    model_config = ConfigDict(extra="ignore")
    name: str = Field(default="answer", max_length=64)
    """Accepted and not used."""
    description: str | None = Field(default=None, max_length=4096)
    """Accepted and not used."""
    # Not "schema": pydantic's models have a method of that name.
    json_schema: Schema | None = Field(default=None, alias="schema")
    """The schema that the text follows."""
    strict: bool | None = None
    """True refuses a schema with keywords that the text cannot follow."""


class ResponseFormat(BaseModel):
    """OpenAI's ``response_format``."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    """``text`` for any text, ``json_object`` for any JSON object, or a schema."""
    json_schema: JsonSchemaFormat | None = None
    """With the type ``json_schema``: the schema."""
    plain_schema: Schema | None = Field(default=None, alias="schema")
    """The schema as in llama.cpp and Together: next to ``json_object`` or ``json_schema``."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_tags(cls, data: object) -> object:
        """Refuse vLLM's structural tags by name.

        :raises ChangeSomething: with the remedy.
        """
        if isinstance(data, dict) and data.get("type") == TAGS:
            remedy = STRUCTURED_OTHERS[TAGS].remedy
            raise ChangeSomething("response_format.type", TAGS, "is not served", remedy)
        return data

    def constraint(self) -> StructuredOutputs | None:
        """Return the constraint of the answer's text; None for plain text.

        :raises ChangeSomething: if the schema is missing, too deep or too long.
        """
        if self.type == "text":
            return None
        if self.plain_schema is not None and self.json_schema is None:
            return json_constraint(self.plain_schema, "response_format.schema")
        if self.type == "json_object":
            return StructuredOutputs(json_object=True, named="response_format")
        if self.json_schema is None or self.json_schema.json_schema is None:
            problem, remedy = "has no schema", "give json_schema.schema"
            raise ChangeSomething("response_format", self.type, problem, remedy)
        schema = self.json_schema.json_schema
        field = "response_format.json_schema.schema"
        strict = (StrictPart("", field),) if self.json_schema.strict else ()
        return json_constraint(schema, field, strict)


def schema_format(schema: Schema) -> ResponseFormat:
    """Return the constraint of text that follows a schema."""
    form = JsonSchemaFormat.model_validate({"schema": schema})
    return ResponseFormat(type="json_schema", json_schema=form)


class StructuredField(BaseModel):
    """vLLM's ``structured_outputs``."""

    model_config = ConfigDict(extra="forbid")
    json_schema: Schema | str | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    json_object: bool | None = None
    """True for any JSON object."""
    regex: str | None = None
    """A pattern for the whole text (Rust syntax, without look-around; its classes are ASCII)."""
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax, or in EBNF (GBNF) with ``root ::= …``."""

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, data: object) -> object:
        """Drop vLLM's fields that ask for what Kvell does anyway.

        :raises ChangeSomething: naming another field.
        """
        if not isinstance(data, dict):
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        others = {str(name): data[name] for name in data.keys() - names}
        owner = "structured_outputs"
        check_others(owner, others, names, STRUCTURED_OTHERS, f"{owner}.")
        return {name: value for name, value in data.items() if name in names}

    def constraint(self) -> StructuredOutputs:
        """Return the constraint of the answer's text.

        :raises ChangeSomething: if there is not exactly one constraint.
        """
        schema = self.json_schema
        return StructuredOutputs(
            None if schema is None else json_text(schema, "structured_outputs.json"),
            bool(self.json_object),
            self.regex,
            () if self.choice is None else choice_texts(self.choice, "structured_outputs.choice"),
            self.grammar,
        )


def json_constraint(
    schema: Schema | str, field: str, strict: tuple[StrictPart, ...] = ()
) -> StructuredOutputs:
    """Return a JSON schema as a constraint.

    :raises ChangeSomething: if the schema is nested too deeply or too long.
    """
    return StructuredOutputs(json=json_text(schema, field), strict=strict, named=field)


def choice_texts(texts: list[str], field: str) -> tuple[str, ...]:
    """Return the texts to choose among.

    :raises ChangeSomething: if there are none.
    """
    if not texts:
        raise ChangeSomething(field, "[]", "has no texts", "leave it out for any text")
    return tuple(texts)
