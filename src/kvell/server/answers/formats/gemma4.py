"""Calls as Gemma 4 writes them (vLLM's ``gemma4``); a call is returned when it is complete.

::

    text <|tool_call>call:weather{city:<|"|>Bern<|"|>,days:[1,2]}<tool_call|>
"""

import re

from kvell.server.answers.deltas import AnswerDelta, Content, ToolCallArguments, ToolCallBegin
from kvell.server.answers.reading.markers import TextUntil, possible_start
from kvell.server.answers.reading.modes import SPACE, Chain, Mode, Step
from kvell.wire.json_text import read_json, write_json

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL = re.compile(
    rf"[{SPACE}]{{0,64}}call:(?P<name>[A-Za-z0-9_.\-]{{1,256}})(?P<arguments>\{{.*\}})[{SPACE}]*",
    re.DOTALL,
)
_S = rf"[{SPACE}]{{0,64}}"
_BARE_KEY = re.compile(rf"([{{,]{_S})([A-Za-z_][A-Za-z0-9_.\-]{{0,255}})(?={_S}:)")


class Gemma4(Chain):
    """Text, then calls, then text again."""

    def __init__(self) -> None:
        super().__init__(TextUntil((START,)))

    def _next(self, ended: Mode) -> Mode:
        if isinstance(ended, TextUntil):
            return _Call(self._calls, ended.opening)
        assert isinstance(ended, _Call)
        self._calls += ended.begun
        return TextUntil((START,), drops_blank=ended.begun)


class _Call:
    """One call, held back up to its last token; ``begun`` is False if it is not a call."""

    def __init__(self, index: int, opening: str) -> None:
        self._index, self._opening = index, opening
        self._held: list[str] = []
        self._tail = ""
        self.begun = False

    def push(self, text: str) -> Step:
        text = self._tail + text
        end = text.find(END)
        keep = end if end >= 0 else possible_start(text, (END,))
        self._held.append(text[:keep])
        self._tail = "" if end >= 0 else text[keep:]
        if end < 0:
            return [], None
        return self._read(END), text[end + len(END) :]

    def finish(self) -> list[AnswerDelta]:
        """Return the call, whose last token may have ended the answer."""
        return self._read(self._tail)

    def _read(self, ending: str) -> list[AnswerDelta]:
        held = "".join(self._held)
        match = _CALL.fullmatch(held)
        arguments = None if match is None else _json(match["arguments"])
        if match is None or arguments is None:
            return [Content(self._opening + held + ending)]
        self.begun = True
        begin = ToolCallBegin(self._index, match["name"])
        return [begin, ToolCallArguments(self._index, arguments)]


def _json(text: str) -> str | None:
    """Return the JSON of arguments; None if they are not of this form."""
    parts = text.split(QUOTE)
    parts[1::2] = [write_json(part) for part in parts[1::2]]
    parts[::2] = [_BARE_KEY.sub(r'\1"\2"', part) for part in parts[::2]]
    try:
        value = read_json("".join(parts))
        return write_json(value) if isinstance(value, dict) else None
    except ValueError:
        return None
