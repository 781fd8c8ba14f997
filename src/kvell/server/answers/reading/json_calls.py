"""A call as a JSON object, ``{"name": …, "arguments": {…}}``, and arguments alone.

Llama's ``parameters`` are read as ``arguments``, and the call may be the ``function`` of another
object, as in OpenAI's API.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvell.server.answers.deltas import AnswerDelta, Content, ToolCallArguments, ToolCallBegin
from kvell.server.answers.reading.modes import SPACE, Step
from kvell.wire.json_text import read_json, write_json

_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


@dataclass(frozen=True)
class Brackets:
    """The brackets and quotes of a language.

    :param pairs: closing brackets by opening bracket.
    :param notable: pattern of brackets, quotes and characters that are invalid outside strings.
    """

    pairs: Mapping[str, str]
    quotes: str
    notable: re.Pattern[str] = field(repr=False)


JSON = Brackets({"{": "}", "[": "]"}, '"', re.compile(r"[^\s0-9A-Za-z,:.+\-]"))
PYTHON = Brackets({"(": ")", "[": "]", "{": "}"}, "\"'", re.compile(r"[\"'()\[\]{}]"))


class BracketSpan:
    """A scan of a text that begins with a bracket, up to its closing bracket.

    It keeps a stack instead of recursing, and reads every character once.

    :param opened: closing brackets that are already expected; if "", the text begins with
        ``first`` after optional whitespace.
    """

    def __init__(self, language: Brackets = JSON, opened: str = "", first: str = "{") -> None:
        self._language = language
        self._owed = list(opened)
        self._first = first
        self._quote = ""
        self._escaped = False
        self.closed = False
        self.broken = False
        self.deepest = len(opened)

    @property
    def depth(self) -> int:
        return len(self._owed)

    @property
    def ended(self) -> bool:
        return self.closed or self.broken

    def scan(self, text: str, down_to: int = 0) -> int:
        """Scan the next text; return the position of the stop, or the text's length.

        The scan stops after the bracket that leaves only ``down_to`` brackets open, and before
        an invalid character, which sets ``broken``.
        """
        at = 0
        while at < len(text):
            if self._quote:
                at = self._skip_string(text, at)
            elif not self._owed:
                at = self._start(text, at)
                if self.broken:
                    return at
            else:
                match = self._language.notable.search(text, at)
                if match is None:
                    return len(text)
                at = match.end()
                closed = self._take(match.group())
                if self.broken:
                    return match.start()
                if closed and self.depth <= down_to:
                    self.closed = not self._owed
                    return at
        return at

    def _start(self, text: str, at: int) -> int:
        at = len(text) - len(text[at:].lstrip(SPACE))
        if at == len(text):
            return at
        if text[at] != self._first:
            self.broken = True
            return at
        self._take(text[at])
        return at + 1

    def _take(self, character: str) -> bool:
        """Count a notable character; return whether it closed a bracket."""
        if character in self._language.quotes:
            self._quote = character
        elif character in self._language.pairs:
            self._owed.append(self._language.pairs[character])
            self.deepest = max(self.deepest, self.depth)
        elif self._owed and self._owed[-1] == character:
            self._owed.pop()
            return True
        else:
            self.broken = True
        return False

    def _skip_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _IN_STRING[self._quote].search(text, at)
        if match is None:
            return len(text)
        if match.group() == "\\":
            self._escaped = True
        else:
            self._quote = ""
        return match.end()


MOST_NAME_CHARS = 256
_MOST_HEAD_CHARS = 1024
_S = rf"[{SPACE}]*"
_HEAD = re.compile(
    rf'{_S}\{{{_S}(?:"(?:type|id)"{_S}:{_S}"[^"\\]*"{_S},{_S})*'
    rf'"name"{_S}:{_S}"([^"\\]{{1,{MOST_NAME_CHARS}}})"{_S},{_S}'
    rf'"(?:arguments|parameters)"{_S}:{_S}(?=\{{)'
)
"""The usual beginning of a call, after which its arguments can be streamed."""


class CallObject:
    """A call as a JSON object.

    ::

        head ──usual beginning──► arguments, streamed ──closed──► tail ──closed──► end
          └─ else held back to the end of the object: a call, or content

    :param opening: preceding text, which is content if no call follows.
    """

    def __init__(self, index: int, opening: str = "") -> None:
        self._index = index
        self._opening = opening
        self._head: str | None = ""
        self._held: list[str] = []
        self._span = BracketSpan()
        self._in_arguments = False
        self.begun = False

    def push(self, text: str) -> Step:
        """Return the call's parts; ``begun`` is set once the text is a call."""
        if self.begun:
            return self._push_body(text)
        if self._head is not None:
            head = self._head + text
            match = _HEAD.match(head, 0, _MOST_HEAD_CHARS)
            if match is not None and is_name(match[1]):
                return self._begin(match[1], head[match.end() :])
            self._head = head if len(head) < _MOST_HEAD_CHARS else None
        end = self._span.scan(text)
        self._held.append(text[:end])
        if not self._span.ended:
            return [], None
        return self._whole("".join(self._held)), text[end:]

    def finish(self) -> list[AnswerDelta]:
        held = "".join(self._held)
        if self.begun:
            return [Content(held)] if held.strip(SPACE) else []
        return [Content(self._opening + held)] if self._opening or held else []

    def _begin(self, name: str, text: str) -> Step:
        self.begun = self._in_arguments = True
        self._held = []
        self._span = BracketSpan(opened="}")
        deltas, rest = self._push_body(text)
        return [ToolCallBegin(self._index, name), *deltas], rest

    def _push_body(self, text: str) -> Step:
        deltas: list[AnswerDelta] = []
        if self._in_arguments:
            end = self._span.scan(text, down_to=1)
            if end:
                deltas.append(ToolCallArguments(self._index, text[:end]))
            text = text[end:]
            if self._span.broken:
                return deltas, text
            self._in_arguments = self._span.depth > 1
            if self._in_arguments:
                return deltas, None
        end = self._span.scan(text)
        self._held.append(text[:end])
        if not self._span.ended:
            return deltas, None
        tail = "".join(self._held)
        if self._span.broken or not _ends_object(tail):
            deltas += [Content(tail)] if tail.strip(SPACE) else []
        return deltas, text[end:]

    def _whole(self, text: str) -> list[AnswerDelta]:
        call = None if self._span.broken else _read_call(text)
        if call is None:
            return [Content(self._opening + text)] if self._opening or text else []
        self.begun = True
        name, arguments = call
        return [ToolCallBegin(self._index, name), ToolCallArguments(self._index, arguments)]


class ArgumentsObject:
    """The arguments of a given function, as a streamed JSON object.

    :param opening: preceding text, which is content if no object follows.
    """

    def __init__(self, index: int, name: str, opening: str = "") -> None:
        self._index = index
        self._name = name
        self._lead = [opening]
        self._span = BracketSpan()
        self.begun = False

    def push(self, text: str) -> Step:
        """Return the call's parts; ``begun`` is set once the text is an object."""
        end = self._span.scan(text)
        rest = text[end:] if self._span.ended else None
        if self.begun:
            return [ToolCallArguments(self._index, text[:end])] if end else [], rest
        if self._span.depth or self._span.closed:
            self.begun = True
            arguments = ToolCallArguments(self._index, text[:end].lstrip(SPACE))
            return [ToolCallBegin(self._index, self._name), arguments], rest
        self._lead.append(text[:end])
        return self.finish() if self._span.broken else [], rest

    def finish(self) -> list[AnswerDelta]:
        lead = "" if self.begun else "".join(self._lead)
        return [Content(lead)] if lead else []


def is_name(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= MOST_NAME_CHARS and text.isprintable()


def _read_call(text: str) -> tuple[str, str] | None:
    """Return the name and arguments of a call; None if the text is not a call."""
    try:
        call: dict[str, Any] = read_json(text)
        if isinstance(inner := call.get("function"), dict):  # as in OpenAI's API
            call = inner
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", ""))
        value = read_json(arguments) if isinstance(arguments, str) else arguments or {}
        written = write_json(value)
    except (KeyError, ValueError):
        return None
    return (name, written) if is_name(name) and isinstance(value, dict) else None


def _ends_object(tail: str) -> bool:
    if tail.lstrip(SPACE) == "}":
        return True
    try:
        read_json('{"": 0' + tail)
    except ValueError:
        return False
    return True
