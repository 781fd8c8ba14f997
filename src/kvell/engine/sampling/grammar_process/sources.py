"""Constraints in llguidance's format."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from llguidance._lib import LLMatcher, LLTokenizer  # the package itself may import numpy
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvell.engine.protocol.schemas.following import make_enforceable
from kvell.engine.protocol.schemas.patterns import ascii_classes, ascii_lark
from kvell.engine.protocol.schemas.strict import StrictPart, StrictViolation, find_violation
from kvell.engine.protocol.structured_outputs import CallForm, Calls, StructuredOutputs
from kvell.wire.decoding import MalformedError, decode_json

RULE = re.compile(r"(?:[^\S\n]*(?:(?:#|//)[^\n]*)?\n)*[^\S\n]*[\w-]+\s*::=")
"""The beginning of a grammar in EBNF, after comments: the name of a rule."""
QUOTED = r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)'
COMMENTS = re.compile(rf"({QUOTED})|(?:\#|//)[^\n]*", re.DOTALL)
PIECES = re.compile(rf"({QUOTED})|(\s+)(\|)?|(?<![\w-])(root)(?![\w-])", re.DOTALL)
CHARACTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL
)
NAMED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}
WHOLE = "kvell-whole"
"""The rule of the whole text.  Without recursion it becomes a single lexeme, which matches exactly
what the grammar says; the lexemes of a recursive grammar are as long as they can be."""


def is_ebnf(grammar: str) -> bool:
    return RULE.match(grammar) is not None


def ebnf_lark(grammar: str) -> str:
    """Return a grammar in EBNF, with a rule ``root``, in Lark's syntax.

    llguidance's converter does the work.  It mangles some escapes, and ends a rule before a line
    that begins with ``|``, so literals, characters and lines are first written in its narrower
    form.

    :raises ValueError: with the converter's line about the place that it cannot read.
    """
    bare = COMMENTS.sub(lambda match: match[1] or "", grammar)
    try:
        return gbnf_to_lark(f"{PIECES.sub(_piece, bare)}\nroot ::= {WHOLE}\n")
    except RecursionError:
        raise ValueError("its parentheses are nested too deeply") from None
    except Exception as error:  # the converter raises plain exceptions
        raise ValueError(str(error).replace(WHOLE, "root")) from error


def _piece(match: re.Match[str]) -> str:
    quoted, space, bar, root = match.groups()
    if root:
        return WHOLE
    if quoted:
        if len(quoted) < 2 or quoted[-1] != {'"': '"', "[": "]"}[quoted[0]]:
            line = match.string.count("\n", 0, match.start()) + 1
            raise ValueError(f"line {line}: {quoted[:20]} has no end")
        inner = quoted[1:-1]
        return _literal(inner) if quoted[0] == '"' else f"[{_characters(inner)}]"
    return f"|{space}" if bar else space


def _literal(inner: str) -> str:
    """Return a literal; control characters, which it cannot have, are characters beside it."""
    parts = [""]
    for character, _ in _unescaped(inner):
        if character in '"\\':
            parts[-1] += "\\" + character
        elif character in "\n\r\t":
            parts[-1] += {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
        elif character < " " or character == "\x7f":
            parts += [f"[{_escaped(character)}]", ""]
        else:
            parts[-1] += character
    if len(parts) == 1:
        return f'"{parts[0]}"'
    written = (part if i % 2 else f'"{part}"' for i, part in enumerate(parts))
    return f"({' '.join(written)})"


def _characters(inner: str) -> str:
    """Return the inside of a class of characters."""
    characters = list(_unescaped(inner))
    start = 1 if characters[:1] == [("^", False)] else 0
    text = "^" * start
    place = start
    while place < len(characters):
        text += _escaped(characters[place][0])
        if characters[place + 1 : place + 2] == [("-", False)] and place + 2 < len(characters):
            text += "-" + _escaped(characters[place + 2][0])
            place += 2
        place += 1
    return text


def _escaped(character: str) -> str:
    is_plain = character.isalnum() or character > "\x7f" or character in " _"
    return character if is_plain else f"\\x{ord(character):02x}"


def _unescaped(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a text, and whether each was escaped.

    :raises ValueError: for an escape that is not one of EBNF.
    """
    for *codes, escaped, plain in CHARACTER.findall(text):
        code = "".join(codes)
        if plain:
            yield plain, False
        elif code:
            if 0xD800 <= int(code, 16) <= 0xDFFF or int(code, 16) > 0x10FFFF:
                raise ValueError(f"\\u{code} is not a character; write the character itself")
            yield chr(int(code, 16)), True
        elif escaped in NAMED or not escaped.isalnum():
            yield NAMED.get(escaped, escaped), True
        else:
            raise ValueError(f"\\{escaped} is not an escape; use \\n, \\t, \\x41 or \\u0041")


JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""Options of a JSON grammar.  Spaces are fixed: a small model may otherwise write only spaces.

Without ``\\u``, which would allow a property twice in different spellings."""
CONTROL = re.compile(r"\\u00(?:[01][0-9a-f]|7f)|\\x\{(?:1?[0-9a-f]|7f)\}")
"""A character that needs ``\\u``, in a text or in a pattern."""
BRACKETS = re.compile(r"[\[{]|[^\[{]+")
"""Pieces of a text: a bracket, with which JSON begins, must be a separate lexeme everywhere."""
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class GrammarSource:
    """A grammar, and keywords of its schemas that it does not enforce."""

    grammar: str
    unfollowed: tuple[str, ...] = ()
    violation: StrictViolation | None = None


def source_of(constraint: StructuredOutputs, tokenizer: LLTokenizer) -> GrammarSource:
    """Return a constraint in llguidance's format.

    :raises ValueError: if a schema is not JSON, or is invalid, or EBNF cannot be converted.
    """
    if constraint.calls is not None:
        return _or_calls(constraint, constraint.calls, tokenizer)
    if constraint.json is not None or constraint.json_object:
        answer = _schema(constraint.json, constraint.strict)
        grammar = LLMatcher.grammar_from_json_schema(answer.grammar)
        return replace(answer, grammar=grammar)
    if constraint.regex is not None:
        return GrammarSource(LLMatcher.grammar_from_regex(ascii_classes(constraint.regex)))
    if constraint.grammar is not None:
        if is_ebnf(constraint.grammar):
            return GrammarSource(LLMatcher.grammar_from_lark(ebnf_lark(constraint.grammar)))
        return GrammarSource(LLMatcher.grammar_from_lark(ascii_lark(constraint.grammar)))
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.choice)
    return GrammarSource(LLMatcher.grammar_from_lark(f"start: {choices}"))


def _schema(text: str | None, strict: tuple[StrictPart, ...] = ()) -> GrammarSource:
    """Return a schema for llguidance with options, as JSON text.

    :param text: None for the schema of any object.
    :param strict: parts in which every keyword must be enforced.
    """
    try:
        sent = decode_json(ANY_OBJECT if text is None else text, "schema")
    except MalformedError as error:
        raise ValueError(str(error)) from error
    rewritten = make_enforceable(sent)
    keywords = tuple(dict.fromkeys(entry.keyword for entry in rewritten.unfollowed))
    violation = find_violation(strict, rewritten.unfollowed)
    schema = rewritten.schema
    plain = json.dumps(rewritten.schema)
    if not isinstance(schema, dict):
        return GrammarSource(plain, keywords, violation)
    options = dict(JSON_OPTIONS)
    if CONTROL.search(plain):
        del options["json_allowed_escapes"]
    given = schema.pop("x-guidance", {})
    options |= given if isinstance(given, dict) else {}
    written = json.dumps({**schema, "x-guidance": options})
    return GrammarSource(written, keywords, violation)


def _or_calls(constraint: StructuredOutputs, calls: Calls, tokenizer: LLTokenizer) -> GrammarSource:
    answer = _schema(constraint.json, constraint.strict)
    unfollowed = answer.unfollowed
    more = f"({_written(calls.between, tokenizer)} call)*" if calls.repeats else ""
    names = " | ".join(f"call_{i}" for i in range(len(calls.forms)))
    rules = ["start: answer | calls", f"answer: %json {answer.grammar}", f"calls: call {more}"]
    rules.append(f"call: {names}")
    for i, form in enumerate(calls.forms):
        arguments, keywords = _arguments(form, tokenizer)
        unfollowed += keywords
        begin, end = _written(form.begin, tokenizer), _written(form.end, tokenizer)
        rules.append(f"call_{i}: {begin} {arguments} {end}")
    grammar = LLMatcher.grammar_from_lark("\n".join(rules))
    return GrammarSource(grammar, tuple(dict.fromkeys(unfollowed)), answer.violation)


def _arguments(form: CallForm, tokenizer: LLTokenizer) -> tuple[str, tuple[str, ...]]:
    if not form.schema:
        return _any_text(form.within, tokenizer), ()
    schema = _schema(form.schema)
    return f"%json {schema.grammar}", schema.unfollowed


def _any_text(special: Sequence[str], tokenizer: LLTokenizer) -> str:
    """Return the pattern of any text, in which these texts may be special tokens."""
    text = "/(?s:.*)/"
    numbers = {t for each in special for t in tokenizer.tokenize_str(each, parse_special=True)}
    tokens = " | ".join(f"<[{t}]>" for t in sorted(numbers) if tokenizer.is_special_token(t))
    return f"{text} (({tokens}) {text})*" if tokens else text


def _written(text: str, tokenizer: LLTokenizer) -> str:
    """Return a text in Lark's syntax, with special tokens by number."""
    return " ".join(_terms(text, tokenizer))


def _terms(text: str, tokenizer: LLTokenizer) -> Iterator[str]:
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    for is_special, run in groupby(tokens, tokenizer.is_special_token):
        if is_special:
            yield from (f"<[{token}]>" for token in run)
        else:
            pieces = BRACKETS.findall(tokenizer.decode_bytes(list(run)).decode())
            yield from (json.dumps(piece, ensure_ascii=False) for piece in pieces)
