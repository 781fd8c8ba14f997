"""Constraints in llguidance's words."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llguidance._lib import LLMatcher, LLTokenizer  # the package itself may import numpy

from kvell.engine.protocol.schemas.following import followed
from kvell.engine.protocol.schemas.patterns import ascii_classes, ascii_lark
from kvell.engine.protocol.structured_outputs import CallForm, Calls, StructuredOutputs
from kvell.wire.decoding import MalformedError, decode_json

JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""Fixed spaces: a small model may otherwise write spaces until its tokens are used up.

No ``\\u``: by it a property that must come once could come again in another spelling."""
CONTROL = re.compile(r"\\u00(?:[01][0-9a-f]|7f)")
"""What cannot be written without ``\\u``."""
BRACKETS = re.compile(r"[\[{]|[^\[{]+")
"""An answer in JSON begins with one, which must be one lexeme wherever it stands."""
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class GrammarSource:
    """A grammar, and keywords of its schemas that it does not follow."""

    grammar: str
    unfollowed: tuple[str, ...] = ()


def source_of(asked: StructuredOutputs, tokenizer: LLTokenizer) -> GrammarSource:
    """The constraint in llguidance's form.

    :param tokenizer: llguidance's.
    :raises ValueError: if a schema is not JSON, or cannot be read.
    """
    if asked.calls is not None:
        return _or_calls(asked.json, asked.calls, tokenizer)
    if asked.json is not None or asked.json_object:
        schema, unfollowed = _schema(asked.json)
        return GrammarSource(LLMatcher.grammar_from_json_schema(schema), unfollowed)
    if asked.regex is not None:
        return GrammarSource(LLMatcher.grammar_from_regex(ascii_classes(asked.regex)))
    if asked.grammar is not None:
        return GrammarSource(LLMatcher.grammar_from_lark(ascii_lark(asked.grammar)))
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
    return GrammarSource(LLMatcher.grammar_from_lark(f"start: {choices}"))


def _schema(text: str | None) -> tuple[str, tuple[str, ...]]:
    """A schema as the grammar follows it, with llguidance's options; keywords it does not follow.

    :param text: None for that of any object.
    """
    try:
        sent = decode_json(ANY_OBJECT if text is None else text, "schema")
    except MalformedError as error:
        raise ValueError(str(error)) from error
    found = followed(sent)
    keywords = tuple(dict.fromkeys(one.keyword for one in found.unfollowed))
    schema, plain = found.schema, json.dumps(found.schema)
    if not isinstance(schema, dict):
        return plain, keywords
    options = dict(JSON_OPTIONS)
    if CONTROL.search(plain):
        del options["json_allowed_escapes"]
    given = schema.pop("x-guidance", {})
    options |= given if isinstance(given, dict) else {}
    return json.dumps({**schema, "x-guidance": options}), keywords


def _or_calls(json_text: str | None, calls: Calls, tokenizer: LLTokenizer) -> GrammarSource:
    """A grammar of answers that follow a schema, or are calls."""
    answer, unfollowed = _schema(json_text)
    more = f"({_written(calls.between, tokenizer)} call)*" if calls.repeats else ""
    names = " | ".join(f"call_{i}" for i in range(len(calls.forms)))
    rules = ["start: answer | calls", f"answer: %json {answer}", f"calls: call {more}"]
    rules.append(f"call: {names}")
    for i, form in enumerate(calls.forms):
        arguments, keywords = _arguments(form)
        unfollowed += keywords
        begin, end = _written(form.begin, tokenizer), _written(form.end, tokenizer)
        rules.append(f"call_{i}: {begin} {arguments} {end}")
    grammar = LLMatcher.grammar_from_lark("\n".join(rules))
    return GrammarSource(grammar, tuple(dict.fromkeys(unfollowed)))


def _arguments(form: CallForm) -> tuple[str, tuple[str, ...]]:
    if not form.schema:
        return "/(?s:.*)/", ()
    schema, unfollowed = _schema(form.schema)
    return f"%json {schema}", unfollowed


def _written(text: str, tokenizer: LLTokenizer) -> str:
    """A text in Lark's syntax; a token that is no text stands by its number."""
    return " ".join(_terms(text, tokenizer))


def _terms(text: str, tokenizer: LLTokenizer) -> Iterator[str]:
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    for is_special, run in groupby(tokens, tokenizer.is_special_token):
        if is_special:
            yield from (f"<[{token}]>" for token in run)
        else:
            pieces = BRACKETS.findall(tokenizer.decode_bytes(list(run)).decode())
            yield from (json.dumps(piece, ensure_ascii=False) for piece in pieces)
