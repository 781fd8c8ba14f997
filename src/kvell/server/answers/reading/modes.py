"""A chain of modes, each of which reads a stretch of an answer.

::

    text ──► mode ──► deltas
              └─ its stretch is over: the rest goes to the next mode
"""

from abc import ABC, abstractmethod
from typing import Protocol, TypeAlias

from kvell.server.answers.deltas import AnswerDelta, Content

SPACE = " \t\r\n"
MOST_CHARS_AT_ONCE = 4096
"""Longer pushes are cut, because every end of a mode copies the rest of its push."""

Step: TypeAlias = tuple[list[AnswerDelta], str | None]
"""New deltas, and once the mode is over the text behind it."""


class Mode(Protocol):
    """Reads one stretch of an answer."""

    def push(self, text: str) -> Step:
        """Read on; gets no empty text, and none after it was over."""
        ...

    def finish(self) -> list[AnswerDelta]:
        """Parts still held back, if the answer ends here."""
        ...


class Chain(ABC):
    """A mode that is a chain of modes."""

    def __init__(self, first: Mode) -> None:
        self._mode = first
        self._calls = 0

    def push(self, text: str) -> Step:
        """Have the modes read it, one after the other."""
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
        """Parts that the mode just now holds back."""
        return self._mode.finish()

    @property
    def current(self) -> Mode:
        """The mode that reads just now."""
        return self._mode

    @abstractmethod
    def _next(self, ended: Mode) -> Mode | None:
        """Return what reads the text behind a mode; None if the chain is over."""


def _has_to_say(mode: Mode) -> bool:
    """Whether a mode gives deltas without more text."""
    return isinstance(mode, Say) or (isinstance(mode, Chain) and _has_to_say(mode.current))


class ModeParser:
    """The answer parser that is one mode, which is never over."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def push(self, text: str) -> list[AnswerDelta]:
        """Parts that are certain with this text."""
        deltas: list[AnswerDelta] = []
        for start in range(0, len(text), MOST_CHARS_AT_ONCE):
            deltas += self._mode.push(text[start : start + MOST_CHARS_AT_ONCE])[0]
        return deltas

    def finish(self) -> list[AnswerDelta]:
        """Parts still held back."""
        return self._mode.finish()


class Say:
    """Shows deltas and reads nothing."""

    def __init__(self, *deltas: AnswerDelta) -> None:
        self._deltas = list(deltas)

    def push(self, text: str) -> Step:
        """Give the deltas, once."""
        return self._deltas, text

    def finish(self) -> list[AnswerDelta]:
        """Give the deltas."""
        return self._deltas


class Blank:
    """Whitespace that is not shown."""

    def push(self, text: str) -> Step:
        """Skip."""
        body = text.lstrip(SPACE)
        return [], body or None

    def finish(self) -> list[AnswerDelta]:
        """Give nothing."""
        return []


class PlainText:
    """An answer that is content and nothing else.

    :param drops_blank: it is not shown if it is nothing but whitespace.
    """

    def __init__(self, *, drops_blank: bool = False) -> None:
        self._drops_blank = drops_blank
        self._space: list[str] = []

    def push(self, text: str) -> Step:
        """Return the text as content."""
        if self._drops_blank and not text.strip(SPACE):
            self._space.append(text)
            return [], None
        text = "".join(self._space) + text
        self._drops_blank, self._space = False, []
        return [Content(text)], None

    def finish(self) -> list[AnswerDelta]:
        """Nothing."""
        return []
