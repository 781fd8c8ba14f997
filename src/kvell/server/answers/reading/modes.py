"""A chain of modes, each of which parses one section of an answer.

::

    text ──► mode ──► deltas
              └─ at the section's end: the rest is passed to the next mode
"""

from abc import ABC, abstractmethod
from typing import Protocol, TypeAlias

from kvell.server.answers.deltas import AnswerDelta, Content

SPACE = " \t\r\n"
MOST_CHARS_AT_ONCE = 4096
"""Longer pushes are split, because every end of a mode copies the rest of its push."""

Step: TypeAlias = tuple[list[AnswerDelta], str | None]
"""New deltas, and the rest of the text once the mode has ended, else None."""


class Mode(Protocol):
    """A parser of one section of an answer."""

    def push(self, text: str) -> Step:
        """Parse the next text; never called with "" or after the mode has ended."""
        ...

    def finish(self) -> list[AnswerDelta]:
        """Return the parts that are still held back; called if the answer ends here."""
        ...


class Chain(ABC):
    """A mode that is a chain of modes."""

    def __init__(self, first: Mode) -> None:
        self._mode = first
        self._calls = 0

    def push(self, text: str) -> Step:
        deltas: list[AnswerDelta] = []
        rest: str | None = text
        while rest or (rest is not None and _has_to_say(self._mode)):
            new, rest = self._mode.push(rest)
            deltas += new
            if rest is not None:
                following = self._next(self._mode)
                if following is None:
                    return deltas, rest
                self._mode = following
        return deltas, None

    def finish(self) -> list[AnswerDelta]:
        return self._mode.finish()

    @property
    def current(self) -> Mode:
        return self._mode

    @abstractmethod
    def _next(self, ended: Mode) -> Mode | None:
        """Return the successor of a mode; None if the chain has ended."""


def _has_to_say(mode: Mode) -> bool:
    return isinstance(mode, Say) or (isinstance(mode, Chain) and _has_to_say(mode.current))


class ModeParser:
    """A parser of one answer's text by a mode, which never ends.

    The merged parts do not depend on the size of pushes.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def push(self, text: str) -> list[AnswerDelta]:
        """Return the parts that are certain after this text."""
        deltas: list[AnswerDelta] = []
        for start in range(0, len(text), MOST_CHARS_AT_ONCE):
            deltas += self._mode.push(text[start : start + MOST_CHARS_AT_ONCE])[0]
        return deltas

    def finish(self) -> list[AnswerDelta]:
        """Return the parts that are still held back; called once, after the last text."""
        return self._mode.finish()


class Say:
    """A mode that yields given deltas and reads no text."""

    def __init__(self, *deltas: AnswerDelta) -> None:
        self._deltas = list(deltas)

    def push(self, text: str) -> Step:
        """Return the deltas and the whole text; called once."""
        return self._deltas, text

    def finish(self) -> list[AnswerDelta]:
        return self._deltas


class Blank:
    """A mode that drops whitespace."""

    def push(self, text: str) -> Step:
        """Drop whitespace; the first other character ends the mode."""
        body = text.lstrip(SPACE)
        return [], body or None

    def finish(self) -> list[AnswerDelta]:
        return []


class PlainText:
    """An answer of content only."""

    def __init__(self, *, drops_blank: bool = False) -> None:
        self._drops_blank = drops_blank
        self._space: list[str] = []

    def push(self, text: str) -> Step:
        if self._drops_blank and not text.strip(SPACE):
            self._space.append(text)
            return [], None
        text = "".join(self._space) + text
        self._drops_blank = False
        self._space = []
        return [Content(text)], None

    def finish(self) -> list[AnswerDelta]:
        return []
