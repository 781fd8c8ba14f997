"""A scanner for the end of a bracketed text: a JSON object or a Python call."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvell.server.answers.reading.modes import SPACE

_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


@dataclass(frozen=True)
class Brackets:
    """The brackets and quotes of a language.

    :param pairs: closing brackets by opening bracket.
    :param quotes: characters that delimit strings; brackets in strings do not count.
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
