"""Modes that search streamed text for markers."""

import re
from collections.abc import Callable

from kvell.server.answers.deltas import AnswerDelta, Content
from kvell.server.answers.reading.modes import SPACE, Step


class TextUntil:
    """Text up to the first of several markers; whitespace before a marker belongs to the marker.

    :param markers: no marker contains another.
    :param left: further markers, which are left to the next mode.
    """

    def __init__(
        self,
        markers: tuple[str, ...],
        make: Callable[[str], AnswerDelta] = Content,
        *,
        left: tuple[str, ...] = (),
        drops_lead: bool = False,
        drops_blank: bool = False,
    ) -> None:
        self._markers = markers + left
        self._left = left
        self._pattern = re.compile("|".join(map(re.escape, self._markers)))
        self._make = make
        self._drops_lead = drops_lead
        self._drops_blank = drops_blank or drops_lead
        self._space: list[str] = []
        self._held = ""
        self.marker = ""
        self.opening = ""

    def push(self, text: str) -> Step:
        """Return text before a marker; ``opening`` is ``marker`` with the whitespace before it."""
        text = self._held + text
        match = self._pattern.search(text)
        keep = match.start() if match else possible_start(text, self._markers)
        self._held = "" if match else text[keep:]
        shown = self._solid(text[:keep])
        if match is None:
            return shown, None
        self.marker = match.group()
        self.opening = "".join(self._space) + self.marker
        return shown, text[match.start() if self.marker in self._left else match.end() :]

    def finish(self) -> list[AnswerDelta]:
        if self._drops_blank and not self._held:
            return []
        text = "".join(self._lead()) + self._held
        return [self._make(text)] if text else []

    def _solid(self, text: str) -> list[AnswerDelta]:
        solid = text.rstrip(SPACE)
        if not solid:
            self._space.append(text)
            return []
        shown = "".join(self._lead()) + (solid.lstrip(SPACE) if self._drops_lead else solid)
        self._space = [text[len(solid) :]]
        self._drops_lead = self._drops_blank = False
        return [self._make(shown)]

    def _lead(self) -> list[str]:
        return [] if self._drops_lead else self._space


class Expect:
    """Optional whitespace and one of several markers; other text is left to the next mode.

    :param before: preceding text, which is content if no call follows.
    :param make: constructor of the delta of the held text, if the answer ends here.
    :param keeps_blank: whether that delta is also made for whitespace only.
    """

    def __init__(
        self,
        *markers: str,
        before: str = "",
        make: Callable[[str], AnswerDelta] = Content,
        keeps_blank: bool = False,
    ) -> None:
        self.before = before
        self._markers = markers
        self._make = make
        self._keeps_blank = keeps_blank
        self._space: list[str] = []
        self._held = ""
        self.marker = ""
        self.opening = ""

    def push(self, text: str) -> Step:
        """Return no delta; at the end, ``marker`` is the marker or ""."""
        text = self._held + text
        body = text.lstrip(SPACE)
        self._space.append(text[: len(text) - len(body)])
        self._held = body
        if not body:
            return [], None
        for marker in self._markers:
            if body.startswith(marker):
                self.marker = marker
                self.opening = self.before + "".join(self._space) + marker
                return [], body[len(marker) :]
        if any(marker.startswith(body) for marker in self._markers):
            return [], None
        return [], "".join(self._space) + body

    def finish(self) -> list[AnswerDelta]:
        text = self.before + "".join(self._space) + self._held
        shown = text and (self.before or self._held or self._keeps_blank)
        return [self._make(text)] if shown else []


def possible_start(text: str, markers: tuple[str, ...]) -> int:
    longest = max(len(marker) for marker in markers) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)
