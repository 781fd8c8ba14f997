"""The channels of gpt-oss (vLLM's ``openai`` and ``gpt_oss``; OpenAI's harmony format).

::

    <|channel|>analysis<|message|>The user wants …<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{…}
    <|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

The prompt ends with ``<|start|>assistant``, so an answer begins in the middle of a header.
"""

import re
from dataclasses import dataclass

from kvell.engine.protocol.structured_outputs import Reasoning as Reasoned
from kvell.server.answers.deltas import (
    AnswerDelta,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from kvell.server.answers.reading.json_calls import is_name
from kvell.server.answers.reading.markers import Expect, TextUntil
from kvell.server.answers.reading.modes import Chain, Mode, PlainText, Step

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
FINAL = "final"
REASONING = Reasoned((CHANNEL + FINAL, MESSAGE))
"""The text before the message of the final channel: other messages, and its header."""
_FUNCTIONS = "functions."
TO = f"to={_FUNCTIONS}"
_MOST_HEADER_CHARS = 512
_HEADER_END = re.compile(r"<\|(?:message|end|return|call)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s{0,64}(\w{1,64})")
_TO = re.compile(r"(?:^|\s)to=([^\s<]{1,300})")


@dataclass(frozen=True)
class Sorting:
    """The parts that are separated from content: reasoning, calls, both or neither."""

    reasoning: bool = True
    calls: bool = True


class Harmony(Chain):
    """Messages, each with a header that names its channel.

    :param final: mode that reads the first message of the final channel and all text after it,
        unless a call precedes it; None: that text is content.
    """

    def __init__(self, sorting: Sorting = Sorting(), final: Mode | None = None) -> None:
        super().__init__(Expect(START, CHANNEL, MESSAGE, TO, keeps_blank=True))
        self._sorting = sorting
        self._final = final

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case _ if ended is self._final:
                return PlainText()
            case Expect() | TextUntil() if ended.marker in (START, CHANNEL, MESSAGE, TO):
                if isinstance(ended, ArgumentsUntil):
                    self._calls += 1
                if ended.marker == MESSAGE:
                    return self._body(Header(self._calls, "", self._sorting))
                return Header(self._calls, ended.opening, self._sorting)
            case Header(complete=True):
                return self._body(ended)
            case TextUntil():
                self._calls += isinstance(ended, ArgumentsUntil)
                return TextUntil((START, CHANNEL, MESSAGE), drops_blank=True)
            case _:
                return TextUntil((START, CHANNEL, MESSAGE))

    def _body(self, header: "Header") -> Mode:
        ends = (*ENDS, START, CHANNEL)
        if header.function:
            return ArgumentsUntil(ends, self._calls)
        if header.channel == FINAL and self._final is not None and not self._calls:
            return self._final
        if header.channel == "analysis" and self._sorting.reasoning:
            return TextUntil(ends, Reasoning)
        return TextUntil(ends)


class Header:
    """The header of a message; ``complete`` is False if the text is not a header."""

    def __init__(self, index: int, opening: str, sorting: Sorting) -> None:
        self._index = index
        self._opening = opening
        self._sorting = sorting
        self._held = ""
        self.complete = False
        self.channel = ""
        self.function = ""

    def push(self, text: str) -> Step:
        self._held += text
        match = _HEADER_END.search(self._held, 0, _MOST_HEADER_CHARS)
        if match is None and len(self._held) < _MOST_HEADER_CHARS:
            return [], None
        if match is None or match.group() != MESSAGE:
            return [Content(self._opening)], self._held
        self.complete = True
        return self._read(self._opening + self._held[: match.start()]), self._held[match.end() :]

    def finish(self) -> list[AnswerDelta]:
        return [Content(self._opening + self._held)]

    def _read(self, header: str) -> list[AnswerDelta]:
        channel, to = _CHANNEL.search(header), _TO.search(header)
        self.channel = channel[1] if channel else ""
        name = to[1].removeprefix(_FUNCTIONS) if to and to[1].startswith(_FUNCTIONS) else ""
        if not self._sorting.calls or not is_name(name):
            return []
        self.function = name
        return [ToolCallBegin(self._index, name)]


class ArgumentsUntil(TextUntil):
    """The arguments of a call up to a marker; empty text becomes an empty object."""

    def __init__(self, markers: tuple[str, ...], index: int) -> None:
        self._index = index
        self._any = False
        super().__init__(markers, self._arguments, drops_lead=True)

    def push(self, text: str) -> Step:
        deltas, rest = super().push(text)
        return (deltas, None) if rest is None else ([*deltas, *self._nothing()], rest)

    def finish(self) -> list[AnswerDelta]:
        return [*super().finish(), *self._nothing()]

    def _arguments(self, text: str) -> AnswerDelta:
        self._any = True
        return ToolCallArguments(self._index, text)

    def _nothing(self) -> list[AnswerDelta]:
        return [] if self._any else [ToolCallArguments(self._index, "{}")]
