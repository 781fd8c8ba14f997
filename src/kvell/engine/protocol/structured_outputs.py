"""Constraints on the text of an answer, and limits of its reasoning."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from kvell.engine.protocol.given import flag, text, texts
from kvell.engine.protocol.schemas.strict import StrictPart
from kvell.equivalents.arguments import STRUCTURED_OTHERS
from kvell.equivalents.other import refuses_unknown, show
from kvell.errors import ChangeSomething
from kvell.wire.json_text import depth_of

MAX_GRAMMAR_CHARS = 131_072
MAX_CHOICES = 1024
MAX_SCHEMA_DEPTH = 64
MAX_ENDS = 8
MAX_TAG_CHARS = 64
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Reasoning:
    """The unconstrained reasoning at the beginning of an answer; the constraint holds after it.

    An answer that never ends its reasoning ends at its limit of tokens or at a stop token.

    :param ends: texts that end the reasoning when all have occurred in order.
    :param start: text with which the model may begin reasoning; an answer that begins otherwise is
        constrained from its first token.  If ``start`` is not one token of the tokenizer, the model
        has no such choice.  "" if the answer begins inside its reasoning.
    :raises ChangeSomething: if there is no end, or a text is empty or too long.
    """

    ends: tuple[str, ...]
    start: str = ""

    def __post_init__(self) -> None:
        field = "structured_outputs.reasoning"
        if not 1 <= len(self.ends) <= MAX_ENDS or not all(self.ends):
            problem = "is not a list of texts that end it"
            remedy = f"give 1 to {MAX_ENDS}, none empty"
            raise ChangeSomething(f"{field}.ends", f"{len(self.ends)} texts", problem, remedy)
        if (longest := max(map(len, (*self.ends, self.start)))) > MAX_TAG_CHARS:
            remedy = f"use at most {MAX_TAG_CHARS}"
            raise ChangeSomething(field, f"{longest} characters", "is too long", remedy)


@dataclass(frozen=True)
class ReasoningBudget:
    """A limit of reasoning tokens; the next token is then ``end``.

    :param tokens: the limit, without the tokens that begin and end the reasoning; at least 0.
    :param end: the token that ends the reasoning.
    :param start: the token with which the model may begin reasoning; an answer that begins
        otherwise has none.  None if the answer begins inside its reasoning.
    :param calls: tokens that begin a call, which ends the reasoning too.
    :raises ChangeSomething: if the budget or a token is negative.
    """

    tokens: int
    end: int
    start: int | None = None
    calls: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 0:
            remedy = "use 0 or more, or leave it out for no bound"
            raise ChangeSomething("thinking_token_budget", self.tokens, "is negative", remedy)
        if min(self.end, self.start or 0, *self.calls) < 0:
            value = f"{self.end}, {self.start}"
            raise ChangeSomething("reasoning_budget", value, "are not tokens", "use token ids")

    def end_place(self, first: int) -> int:
        """Return the position in the output at which the end is forced, unless it comes before.

        :param first: the answer's first token; negative before there is one.
        :returns: -1 if the answer has no reasoning to end.
        """
        if self.start is None:
            return self.tokens
        return 1 + self.tokens if first == self.start else -1


@dataclass(frozen=True)
class CallForm:
    """The format in which a model writes a call of one function.

    :param begin: text before the arguments.
    :param schema: a JSON schema of the arguments, as JSON text; "" if any text may follow to the
        end of the answer.
    :param end: text after the arguments.
    :param within: special tokens that may occur in arguments without a schema.
    """

    begin: str
    schema: str = ""
    end: str = ""
    within: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calls:
    """Calls that an answer may have in place of constrained JSON.

    :param forms: the formats, of which each call has one.
    :param between: text between two calls.
    :param repeats: whether an answer may have several calls.
    """

    forms: tuple[CallForm, ...]
    between: str = ""
    repeats: bool = True

    @property
    def num_chars(self) -> int:
        """Number of characters of all forms."""
        return sum(len(form.begin) + len(form.schema) + len(form.end) for form in self.forms)


def json_text(schema: object, field: str) -> str:
    """Return a JSON schema as JSON text.

    :param schema: text, a mapping, or a boolean.
    :raises ChangeSomething: if it has another type, is nested too deeply, or is not valid JSON.
    """
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping | bool):
        problem, remedy = "is not a JSON schema", 'give one like {"type": "object"}'
        raise ChangeSomething(field, show(schema), problem, remedy)
    if depth_of(schema, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        remedy = f"use at most {MAX_SCHEMA_DEPTH} levels"
        raise ChangeSomething(field, "…", "is nested too deeply", remedy)
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError) as error:
        problem = f"cannot be written as JSON ({error})"
        raise ChangeSomething(field, "…", problem, "use JSON's types") from error


@refuses_unknown(STRUCTURED_OTHERS)
@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on an answer, of exactly one kind, with vLLM's names.

    JSON schemas have the meaning of OpenAI's strict mode: an object that names properties has no
    others, unless ``additionalProperties`` allows them.

    :param json: a JSON schema, as JSON text or as a mapping, which becomes text.
    :param json_object: True for any JSON object.
    :param regex: a pattern for the whole text (Rust syntax, without look-around; ``\\d``,
        ``\\w`` and ``\\s`` are ASCII, as in the pattern of a schema).
    :param choice: the text is one of these.
    :param grammar: a context-free grammar in Lark's syntax, or in EBNF as xgrammar's or llama.cpp's
        GBNF, with ``root ::= …``.
    :param reasoning: unconstrained text before the constrained text.
    :param calls: calls that the answer may have instead; only with ``json`` and ``json_object``.
    :param strict: parts of ``json`` in which every keyword must be enforced.
    :param named: the client's name of the field, for errors; "" for the name here.
    :raises ChangeSomething: if there is not exactly one constraint, or it is out of bounds.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    reasoning: Reasoning | None = None
    calls: Calls | None = None
    strict: tuple[StrictPart, ...] = ()
    named: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        self._read()
        if len(self._given()) != 1:
            kinds = ", ".join(self._given()) or "none"
            remedy = f"give one of {', '.join(_KINDS[:-1])} and {_KINDS[-1]}"
            raise ChangeSomething("structured_outputs", kinds, "is not one constraint", remedy)
        if self.num_chars > MAX_GRAMMAR_CHARS:
            size = f"{self.num_chars} characters"
            remedy = f"use at most {MAX_GRAMMAR_CHARS}"
            raise ChangeSomething(self.field_name, size, "is too long", remedy)
        if len(self.choice) > MAX_CHOICES:
            size, remedy = f"{len(self.choice)} texts", f"give at most {MAX_CHOICES}"
            raise ChangeSomething(self.field_name, size, "are too many", remedy)
        if any(not text for text in self.choice):
            raise ChangeSomething(self.field_name, "''", "is an empty text", "leave it out")
        if self.calls is not None and self.kind not in ("json", "json_object"):
            raise ChangeSomething(self.field_name, "…", "cannot be combined with calls", "use json")
        if "" in (self.json, self.regex, self.grammar):
            raise ChangeSomething(self.field_name, "''", "is empty", "leave it out for any text")

    def _read(self) -> None:
        """Convert the given values to the fields' types."""

        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if self.json is not None:
            put("json", json_text(self.json, self._field("json")))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            put(name, None if value is None else text(self._field(name), value))
        put("json_object", flag(self._field("json_object"), self.json_object or False))
        field = self._field("choice")
        choice: object = self.choice
        if isinstance(choice, str):
            raise ChangeSomething(field, show(choice), "is one text", "give a list of texts")
        if isinstance(choice, list) and not choice:
            raise ChangeSomething(field, "[]", "has no texts", "leave it out for any text")
        put("choice", texts(field, choice))

    def _field(self, name: str) -> str:
        """Return the client's name of a field."""
        return self.named or f"structured_outputs.{name}"

    @property
    def kind(self) -> str:
        """The name of the constraint's field."""
        return self._given()[0]

    @property
    def field_name(self) -> str:
        """The client's name of the constraint's field."""
        return self._field(self.kind)

    @property
    def num_chars(self) -> int:
        """Number of characters of the constraint."""
        texts = [self.json, self.regex, self.grammar, *self.choice]
        calls = 0 if self.calls is None else self.calls.num_chars
        return calls + sum(len(text) for text in texts if text is not None)

    def bare(self) -> "StructuredOutputs":
        """Return the constraint without ``reasoning`` and ``named``."""
        is_bare = self.reasoning is None and not self.named
        return self if is_bare else replace(self, reasoning=None, named="")

    def _given(self) -> list[str]:
        """Return the kinds that are neither None, nor False, nor empty."""
        return [name for name in _KINDS if getattr(self, name) not in (None, False, ())]
