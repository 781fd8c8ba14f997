"""What the text of an answer must look like, and how much it may reason before."""

from dataclasses import dataclass, replace

from kvell.errors import ChangeSomething

MAX_GRAMMAR_CHARS = 131_072
MAX_CHOICES = 1024
MAX_ENDS = 8
MAX_TAG_CHARS = 64


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
class StructuredOutputs:
    """Exactly one kind of constraint, with vLLM's names.

    :param json: a JSON schema, as JSON text.
    :param json_object: True for any JSON object.
    :param regex: a pattern for the whole text (Rust syntax, without look-around).
    :param choice: the text is one of these.
    :param grammar: a context-free grammar in Lark's syntax.
    :param reasoning: what the answer may say before, which the constraint does not bind.
    :raises ChangeSomething: if there is none or more than one, or one is out of bounds.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        if len(self._given()) != 1:
            found = ", ".join(self._given()) or "none"
            remedy = "give one of json, json_object, regex, choice and grammar"
            raise ChangeSomething("structured_outputs", found, "is not one constraint", remedy)
        if self.num_chars > MAX_GRAMMAR_CHARS:
            size = f"{self.num_chars} characters"
            remedy = f"use at most {MAX_GRAMMAR_CHARS}"
            raise ChangeSomething(f"structured_outputs.{self.kind}", size, "is too long", remedy)
        if len(self.choice) > MAX_CHOICES:
            remedy = f"give at most {MAX_CHOICES}"
            raise ChangeSomething(
                "structured_outputs.choice", f"{len(self.choice)} texts", "are too many", remedy
            )
        if any(not text for text in self.choice):
            raise ChangeSomething(
                "structured_outputs.choice", "''", "is an empty text", "leave it out"
            )

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return self._given()[0]

    @property
    def num_chars(self) -> int:
        """Characters of the constraint."""
        texts = [self.json, self.regex, self.grammar, *self.choice]
        return sum(len(text) for text in texts if text is not None)

    def bare(self) -> "StructuredOutputs":
        """The constraint alone, wherever in an answer it begins."""
        return self if self.reasoning is None else replace(self, reasoning=None)

    def _given(self) -> list[str]:
        fields = {
            "json": self.json is not None,
            "json_object": self.json_object,
            "regex": self.regex is not None,
            "choice": bool(self.choice),
            "grammar": self.grammar is not None,
        }
        return [name for name, is_given in fields.items() if is_given]
