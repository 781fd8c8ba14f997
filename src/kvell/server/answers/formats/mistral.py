"""Calls as Mistral's models write them (vLLM's ``mistral``).

::

    text [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}}, {"name": …}]
    text [TOOL_CALLS]weather{"city": "Bern"}[TOOL_CALLS]…
    text [TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Bern"}
"""

import re

from kvell.server.answers.deltas import AnswerDelta, Content
from kvell.server.answers.reading.json_calls import ArgumentsObject, CallObject
from kvell.server.answers.reading.markers import Expect, TextUntil
from kvell.server.answers.reading.modes import SPACE, Chain, Mode, Step

START, LIST, MORE, LIST_END = "[TOOL_CALLS]", "[", ",", "]"
_S = rf"[{SPACE}]{{0,64}}"
_NAME = r"[A-Za-z0-9_.\-]"
_HEAD = re.compile(rf"({_NAME}{{1,256}})(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?{_S}(?=\{{)")
_POSSIBLE = re.compile(rf"{_NAME}{{0,256}}(?:\[[A-Z_]{{0,7}}(?:\]\w{{0,64}})?){{0,2}}{_S}")


class Mistral(Chain):
    """Text, then calls in a list or one by one, then text again."""

    def __init__(self) -> None:
        super().__init__(TextUntil((START,)))

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case TextUntil():
                return Expect(LIST, before=ended.opening)
            case Expect(marker="[" | ","):
                return CallObject(self._calls, ended.opening)
            case Expect(before=before) if before:
                return FunctionName(before)
            case FunctionName() if ended.name:
                return ArgumentsObject(self._calls, ended.name)
            case CallObject(begun=True):
                self._calls += 1
                return Expect(MORE, LIST_END)
            case ArgumentsObject():
                self._calls += 1
                return TextUntil((START,), drops_blank=True)
            case Expect():
                return TextUntil((START,), drops_blank=True)
            case _:
                return TextUntil((START,))


class FunctionName:
    """A function's name before its arguments; ``name`` is empty if there is no name.

    :param opening: preceding text, which is content if no name follows.
    """

    def __init__(self, opening: str) -> None:
        self._opening = [opening]
        self._held = ""
        self.name = ""

    def push(self, text: str) -> Step:
        if not self._held:
            body = text.lstrip(SPACE)
            self._opening.append(text[: len(text) - len(body)])
            text = body
        self._held += text
        if match := _HEAD.match(self._held):
            self.name = match[1]
            return [], self._held[match.end() :]
        if _POSSIBLE.fullmatch(self._held):
            return [], None
        return [Content("".join(self._opening))], self._held

    def finish(self) -> list[AnswerDelta]:
        return [Content("".join(self._opening) + self._held)]
