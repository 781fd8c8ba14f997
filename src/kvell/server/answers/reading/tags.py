"""Pieces of calls written as tags: ``<function=name>``, ``<parameter=name>`` and values."""

import re

from kvell.server.answers.deltas import AnswerDelta, Content, ToolCallArguments
from kvell.server.answers.reading.json_calls import MOST_NAME_CHARS, is_name
from kvell.server.answers.reading.markers import possible_start
from kvell.server.answers.reading.modes import Step
from kvell.server.answers.reading.schema_values import TEXT, value_text
from kvell.wire.json_text import write_json

PARAMETER_END = "</parameter>"
MOST_HEAD_CHARS = 1024
_TAG = re.compile(r"(?P<name>[^>]+)")


class HeadUntil:
    """The beginning of a call up to a marker, which is left to the next mode.

    :param head: pattern of the head, with the group ``name``.
    :param opening: preceding text, which is content if no call follows.
    :ivar name: the function's or parameter's name; "" if the text is not a head.
    """

    def __init__(
        self, marker: str, head: re.Pattern[str], opening: str, most_chars: int = MOST_HEAD_CHARS
    ) -> None:
        self._marker, self._head, self._opening = marker, head, opening
        self._most_chars = most_chars
        self._held = ""
        self.name = ""

    def push(self, text: str) -> Step:
        self._held += text
        at = self._held.find(self._marker, 0, self._most_chars)
        if at < 0 and len(self._held) < self._most_chars:
            return [], None
        match = self._head.fullmatch(self._held, 0, at) if at > 0 else None
        if match is not None and is_name(name := match["name"]):
            self.name = name
            return [], self._held[at:]
        return [Content(self._opening)] if self._opening else [], self._held

    def finish(self) -> list[AnswerDelta]:
        return [Content(self._opening + self._held)]


class TagName(HeadUntil):
    """The rest of an opening tag; ``name`` is empty if the text is not a tag."""

    def __init__(self, opening: str) -> None:
        super().__init__(">", _TAG, opening, MOST_NAME_CHARS + 1)

    def push(self, text: str) -> Step:
        deltas, rest = super().push(text)
        return deltas, rest[1:] if rest and self.name else rest


class Value:
    """A parameter's value up to its closing tag, as the next piece of the arguments.

    :param lead: JSON text that precedes the value.
    """

    def __init__(
        self, index: int, lead: str, types: frozenset[str], end: str = PARAMETER_END
    ) -> None:
        self._ends = ("\n" + end, end)
        self._pattern = re.compile(rf"\n?{re.escape(end)}")
        self._index = index
        self._lead = lead
        self._types = types
        self._whole: list[str] = []
        self._held = ""
        self._started = False

    def push(self, text: str) -> Step:
        text = self._held + text
        if not self._started:
            # The line break after the tag does not belong to the value, and may also be the
            # line break before the closing tag.
            if text == "\n":
                self._held = text
                return [], None
            self._started = True
            text = text.removeprefix("\n")
        match = self._pattern.search(text)
        keep = match.start() if match else possible_start(text, self._ends)
        self._held = "" if match else text[keep:]
        deltas = self._piece(text[:keep], last=match is not None)
        return deltas, None if match is None else text[match.end() :]

    def finish(self) -> list[AnswerDelta]:
        held = self._held if self._started else ""
        if self._types == TEXT:
            return self._piece(held, last=False)
        held = "".join(self._whole) + held
        return self._delta(self._lead + value_text(held, self._types)) if held else []

    def _piece(self, text: str, *, last: bool) -> list[AnswerDelta]:
        if self._types != TEXT:
            self._whole.append(text)
            whole = "".join(self._whole) if last else ""
            return self._delta(self._lead + value_text(whole, self._types)) if last else []
        if not text and not last:
            return []
        lead = self._lead and self._lead + '"'
        self._lead = ""
        return self._delta(lead + write_json(text)[1:-1] + ('"' if last else ""))

    def _delta(self, text: str) -> list[AnswerDelta]:
        return [ToolCallArguments(self._index, text)]
