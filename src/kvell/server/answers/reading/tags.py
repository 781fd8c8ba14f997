"""Pieces of calls written as tags: ``<function=name>``, ``<parameter=name>`` and values."""

import re

from kvell.server.answers.deltas import AnswerDelta, Content, ToolCallArguments
from kvell.server.answers.reading.json_calls import MOST_NAME_CHARS, is_name
from kvell.server.answers.reading.json_text import write_json
from kvell.server.answers.reading.markers import possible_start
from kvell.server.answers.reading.modes import Step
from kvell.server.answers.reading.schema_values import TEXT, value_text

_VALUE_ENDS = ("\n</parameter>", "</parameter>")
_VALUE_END = re.compile(r"\n?</parameter>")


class TagName:
    """The rest of an opening tag; ``name`` is empty if it is none.

    :param opening: the text before it that is content then.
    """

    def __init__(self, opening: str) -> None:
        self._opening = opening
        self._held = ""
        self.name = ""

    def push(self, text: str) -> Step:
        """No delta while it may be a name."""
        self._held += text
        name, bracket, _ = self._held[: MOST_NAME_CHARS + 1].partition(">")
        if bracket and is_name(name):
            self.name = name
            return [], self._held[len(name) + 1 :]
        if bracket or len(name) > MOST_NAME_CHARS:
            return [Content(self._opening)], self._held
        return [], None

    def finish(self) -> list[AnswerDelta]:
        """What was held back, as content."""
        return [Content(self._opening + self._held)]


class Value:
    """A parameter's value up to its closing tag, as the next piece of the arguments.

    :param lead: what stands before the value.
    :param types: JSON types that it may have.
    """

    def __init__(self, index: int, lead: str, types: frozenset[str]) -> None:
        self._index = index
        self._lead = lead
        self._types = types
        self._whole: list[str] = []
        self._held = ""
        self._started = False

    def push(self, text: str) -> Step:
        """What is new of the value."""
        text = self._held + text
        if not self._started:
            # The line break behind the tag is none of the value, and may be the one before its end.
            if text == "\n":
                self._held = text
                return [], None
            self._started = True
            text = text.removeprefix("\n")
        found = _VALUE_END.search(text)
        keep = found.start() if found else possible_start(text, _VALUE_ENDS)
        self._held = "" if found else text[keep:]
        deltas = self._piece(text[:keep], last=found is not None)
        return deltas, None if found is None else text[found.end() :]

    def finish(self) -> list[AnswerDelta]:
        """What was held back, without an end."""
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
        lead, self._lead = self._lead and self._lead + '"', ""
        return self._delta(lead + write_json(text)[1:-1] + ('"' if last else ""))

    def _delta(self, text: str) -> list[AnswerDelta]:
        return [ToolCallArguments(self._index, text)]
