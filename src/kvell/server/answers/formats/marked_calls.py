"""Calls whose name and arguments are between special tokens (DeepSeek V3 and V3.1, Kimi K2).

::

    text <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
    ```json
    {"city": "Bern"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    text <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Bern"}…

    text <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0
    <|tool_call_argument_begin|>{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|>
"""

import re
from dataclasses import dataclass

from kvell.server.answers.deltas import Content
from kvell.server.answers.reading.json_calls import ArgumentsObject
from kvell.server.answers.reading.markers import Expect, TextUntil
from kvell.server.answers.reading.modes import SPACE, Chain, Mode, Say
from kvell.server.answers.reading.tags import HeadUntil

FENCE = "```"
_NAME = r"(?P<name>[A-Za-z0-9_.\-]{1,256}?)"
_S = rf"[{SPACE}]{{0,64}}"


@dataclass(frozen=True)
class CallTokens:
    """The tokens around calls, and the text between a call's first token and its arguments.

    :param head: pattern with the group ``name``.
    :param separators: further tokens that the head may have.
    """

    calls_begin: str
    call_begin: str
    call_end: str
    calls_end: str
    head: re.Pattern[str]
    separators: tuple[str, ...]


DEEPSEEK = CallTokens(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    re.compile(
        rf"{_S}(?:function<｜tool▁sep｜>)?{_NAME}(?:<｜tool▁sep｜>)?{_S}(?:```(?:json)?)?{_S}"
    ),
    ("<｜tool▁sep｜>",),
)
KIMI_K2 = CallTokens(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    re.compile(
        rf"{_S}(?:functions\.)?{_NAME}(?::\d{{1,9}})?{_S}<\|tool_call_argument_begin\|>{_S}"
    ),
    ("<|tool_call_argument_begin|>",),
)


class MarkedCalls(Chain):
    """Text, then calls, then text again."""

    def __init__(self, tokens: CallTokens) -> None:
        self._tokens = tokens
        super().__init__(self._text())

    def _next(self, ended: Mode) -> Mode:
        tokens = self._tokens
        match ended:
            case TextUntil() if ended.marker == tokens.calls_begin:
                return Expect(tokens.call_begin, before=ended.opening)
            case TextUntil():
                return HeadUntil("{", tokens.head, ended.opening)
            case Expect() if ended.marker == tokens.call_begin:
                return HeadUntil("{", tokens.head, ended.opening)
            case HeadUntil() if ended.name:
                return ArgumentsObject(self._calls, ended.name)
            case ArgumentsObject():
                self._calls += 1
                return Expect(FENCE, tokens.call_end)
            case Expect() if ended.marker == FENCE:
                return Expect(tokens.call_end)
            case Expect() if ended.marker == tokens.call_end:
                return Expect(tokens.call_begin, tokens.calls_end)
            case Expect(before=before) if before:
                return Say(Content(before))
            case _:
                return self._text(drops_blank=self._calls > 0)

    def _text(self, *, drops_blank: bool = False) -> TextUntil:
        markers = (self._tokens.calls_begin, self._tokens.call_begin)
        return TextUntil(markers, drops_blank=drops_blank)
