"""What the text of an answer must look like, and how much it may reason before."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from kvell.engine.protocol.given import flag, shown, text, texts
from kvell.errors import ChangeSomething

MAX_GRAMMAR_CHARS = 131_072
MAX_CHOICES = 1024
MAX_SCHEMA_DEPTH = 64
MAX_ENDS = 8
MAX_TAG_CHARS = 64
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Reasoning:
    """What an answer may say first, and no constraint binds; the constraint holds behind it.

    An answer that never ends its reasoning ends at its limit of tokens or at a stop token.

    :param ends: texts that end it, one after the other: it is over behind the last of them.
    :param start: text that begins it if the model chooses so; if it begins otherwise, the
        constraint holds from its first token.  This needs a tokenizer in which it is one token;
        with any other the model has no such choice.  "" if the answer begins inside of it.
    :raises ChangeSomething: if there is no end, or a text is empty or too long.
    """

    ends: tuple[str, ...]
    start: str = ""

    def __post_init__(self) -> None:
        field = "structured_outputs.reasoning"
        if not 1 <= len(self.ends) <= MAX_ENDS or not all(self.ends):
            problem, remedy = "is no list of texts that end it", f"give 1 to {MAX_ENDS}, none empty"
            raise ChangeSomething(f"{field}.ends", f"{len(self.ends)} texts", problem, remedy)
        if (longest := max(map(len, (*self.ends, self.start)))) > MAX_TAG_CHARS:
            remedy = f"use at most {MAX_TAG_CHARS}"
            raise ChangeSomething(field, f"{longest} characters", "is too long", remedy)


@dataclass(frozen=True)
class ReasoningBudget:
    """After so many tokens of reasoning the next token is the one that ends it.

    :param tokens: of reasoning, without those that begin and end it; at least 0.
    :param end: the token that ends it.
    :param start: the token that begins it if the model chooses so; if the answer begins otherwise,
        it has no reasoning.  None if the answer begins inside of it.
    :raises ChangeSomething: if the budget or a token is negative.
    """

    tokens: int
    end: int
    start: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 0:
            remedy = "use 0 or more, or leave it out for no bound"
            raise ChangeSomething("thinking_token_budget", self.tokens, "is negative", remedy)
        if min(self.end, self.start or 0) < 0:
            value = f"{self.end}, {self.start}"
            raise ChangeSomething("reasoning_budget", value, "are no tokens", "use token ids")


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call of one function.

    :param begin: text before the arguments.
    :param schema: a JSON schema of the arguments, as JSON text; "" if any text may follow, which
        then is the rest of the answer.
    :param end: text behind the arguments.
    """

    begin: str
    schema: str = ""
    end: str = ""


@dataclass(frozen=True)
class Calls:
    """Calls that an answer may be instead of JSON that is constrained.

    :param forms: of which each call has one.
    :param between: text between two calls.
    :param repeats: whether there may be several.
    """

    forms: tuple[CallForm, ...]
    between: str = ""
    repeats: bool = True

    @property
    def num_chars(self) -> int:
        """Characters of all forms."""
        return sum(len(one.begin) + len(one.schema) + len(one.end) for one in self.forms)


def json_text(schema: object, field: str) -> str:
    """Return a JSON schema as JSON text.

    :param schema: text, a mapping, or a boolean.
    :raises ChangeSomething: if it is something else, nested too deeply, or holds what JSON has not.
    """
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping | bool):
        problem, remedy = "is no JSON schema", 'give one like {"type": "object"}'
        raise ChangeSomething(field, shown(schema), problem, remedy)
    if depth_of(schema) > MAX_SCHEMA_DEPTH:
        remedy = f"use at most {MAX_SCHEMA_DEPTH} levels"
        raise ChangeSomething(field, "…", "is nested too deeply", remedy)
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError) as error:
        problem = f"cannot be written as JSON ({error})"
        raise ChangeSomething(field, "…", problem, "use JSON's types") from error


def depth_of(value: object) -> int:
    """Return the levels of objects and lists in a JSON value; 0 for anything else.

    It counts level by level, so no depth can exhaust the stack.
    """
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, Mapping | list | tuple)]:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            return depth
        level = [
            part for one in level for part in (one.values() if isinstance(one, Mapping) else one)
        ]
    return depth


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one kind of constraint, with vLLM's names.

    A JSON schema is followed as OpenAI's strict mode does: an object that names properties has no
    others, unless ``additionalProperties`` says so.

    :param json: a JSON schema, as JSON text or as a mapping, which becomes text.
    :param json_object: True for any JSON object.
    :param regex: a pattern for the whole text (Rust syntax, without look-around; ``\\d``,
        ``\\w`` and ``\\s`` are ASCII, as in the pattern of a schema).
    :param choice: the text is one of these.
    :param grammar: a context-free grammar in Lark's syntax.
    :param reasoning: what the answer may say before, which the constraint does not bind.
    :param calls: what the answer may be instead; only beside ``json`` and ``json_object``.
    :param named: what the client called the field, for errors; "" if as here.
    :raises ChangeSomething: if there is none or more than one, or one is out of bounds.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    reasoning: Reasoning | None = None
    calls: Calls | None = None
    named: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        self._read()
        if len(self._given()) != 1:
            found = ", ".join(self._given()) or "none"
            remedy = f"give one of {', '.join(_KINDS[:-1])} and {_KINDS[-1]}"
            raise ChangeSomething("structured_outputs", found, "is not one constraint", remedy)
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
            raise ChangeSomething(self.field_name, "…", "does not go with calls", "use json")
        if "" in (self.json, self.regex, self.grammar):
            raise ChangeSomething(self.field_name, "''", "is empty", "leave it out for any text")

    def _read(self) -> None:
        """Bring what was given to the fields' types."""

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
            raise ChangeSomething(field, shown(choice), "is one text", "give a list of texts")
        if isinstance(choice, list) and not choice:
            raise ChangeSomething(field, "[]", "has no texts", "leave it out for any text")
        put("choice", texts(field, choice))

    def _field(self, name: str) -> str:
        """What the client called a field."""
        return self.named or f"structured_outputs.{name}"

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return self._given()[0]

    @property
    def field_name(self) -> str:
        """What the client called the field that is given."""
        return self._field(self.kind)

    @property
    def num_chars(self) -> int:
        """Characters of the constraint."""
        texts = [self.json, self.regex, self.grammar, *self.choice]
        calls = 0 if self.calls is None else self.calls.num_chars
        return calls + sum(len(text) for text in texts if text is not None)

    def bare(self) -> "StructuredOutputs":
        """The constraint alone, wherever in an answer it begins and whatever it was called."""
        is_bare = self.reasoning is None and not self.named
        return self if is_bare else replace(self, reasoning=None, named="")

    def _given(self) -> list[str]:
        """Kinds that are given: what is neither None, nor False, nor no choice."""
        return [name for name in _KINDS if getattr(self, name) not in (None, False, ())]
