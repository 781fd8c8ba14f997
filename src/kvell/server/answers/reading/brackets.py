"""Finds where a bracketed text ends: a JSON object, or a call as Python writes it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvell.server.answers.reading.modes import SPACE

_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


@dataclass(frozen=True)
class Brackets:
    """What counts in a language.

    :param pairs: closing brackets by their opening ones.
    :param quotes: characters that begin and end a string, in which brackets do not count.
    :param notable: finds the next bracket, quote or character that must not stand outside strings.
    """

    pairs: Mapping[str, str]
    quotes: str
    notable: re.Pattern[str] = field(repr=False)


JSON = Brackets({"{": "}", "[": "]"}, '"', re.compile(r"[^\s0-9A-Za-z,:.+\-]"))
PYTHON = Brackets({"(": ")", "[": "]", "{": "}"}, "\"'", re.compile(r"[\"'()\[\]{}]"))


class BracketSpan:
    """Follows a text that begins with a bracket to where that is closed.

    It keeps a stack of its own, so that deep nesting costs no recursion, and
    looks at every character once.

    :param opened: the closing brackets that are owed already; else the text begins with
        ``first``, with whitespace before it.
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
        """Brackets that are open."""
        return len(self._owed)

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to read."""
        return self.closed or self.broken

    def scan(self, text: str, down_to: int = 0) -> int:
        """Read on; return where it stopped, which is the end unless something ended there.

        It stops behind the bracket that leaves only ``down_to`` open, and before a
        character that cannot stand there, which sets ``broken``.
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
                found = self._language.notable.search(text, at)
                if found is None:
                    return len(text)
                at = found.end()
                closed = self._take(found.group())
                if self.broken:
                    return found.start()
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
        found = _IN_STRING[self._quote].search(text, at)
        if found is None:
            return len(text)
        if found.group() == "\\":
            self._escaped = True
        else:
            self._quote = ""
        return found.end()
