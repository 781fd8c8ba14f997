"""Calls as Qwen 3 Coder, Next and 3.5 write them (vLLM's ``qwen3_coder``), and Seed-OSS.

::

    text <tool_call>
    <function=weather>
    <parameter=city>
    Bern
    </parameter>
    </function>
    </tool_call>

Seed-OSS (vLLM's ``seed_oss``) has ``<seed:tool_call>`` around the function.  Values of string
parameters are streamed, others returned when they are complete.
"""

from collections.abc import Mapping, Sequence

from kvell.engine.protocol.schemas.references import Schema
from kvell.server.answers.deltas import Content, ToolCallArguments, ToolCallBegin
from kvell.server.answers.reading.markers import Expect, TextUntil
from kvell.server.answers.reading.modes import Chain, Mode, Say
from kvell.server.answers.reading.schema_values import TEXT, ParameterTypes
from kvell.server.answers.reading.tags import TagName, Value
from kvell.wire.json_text import write_json

START, END = "<tool_call>", "</tool_call>"
SEED_START, SEED_END = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, FUNCTION_END, PARAMETER = "<function=", "</function>", "<parameter="


class Qwen3Coder(Chain):
    """Text, then calls between tags, then text again."""

    def __init__(self, tools: Sequence[Schema] = (), tags: tuple[str, str] = (START, END)) -> None:
        self._start, self._end = tags
        super().__init__(TextUntil((self._start, FUNCTION)))
        self._types = ParameterTypes(tools)

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case TextUntil() if ended.marker == self._start:
                return Expect(FUNCTION, before=ended.opening)
            case TextUntil() | Expect(marker="<function="):
                return TagName(ended.opening)
            case TagName(name=name) if name:
                return FunctionBody(self._calls, name, self._types.of(name), self._end)
            case FunctionBody():
                self._calls += 1
                return Expect(self._end) if ended.end == FUNCTION_END else self._text()
            case Expect(before=before) if before:
                return Say(Content(before))
            case _:
                return self._text(drops_blank=isinstance(ended, Expect))

    def _text(self, drops_blank: bool = True) -> TextUntil:
        return TextUntil((self._start, FUNCTION), drops_blank=drops_blank)


class FunctionBody(Chain):
    """A call after its opening tag; ``end`` is the tag that closed it."""

    def __init__(
        self, index: int, name: str, types: Mapping[str, frozenset[str]], closing_tag: str
    ) -> None:
        super().__init__(Say(ToolCallBegin(index, name)))
        self._index = index
        self._types, self._closing_tag = types, closing_tag
        self._lead = "{"
        self.end = ""

    def _next(self, ended: Mode) -> Mode | None:
        match ended:
            case TextUntil() if ended.marker == PARAMETER:
                return TagName(ended.opening)
            case TextUntil():
                self.end = ended.marker
                closing = "{}" if self._lead == "{" else "}"
                return Say(ToolCallArguments(self._index, closing))
            case TagName(name=name) if name:
                lead, self._lead = self._lead, ", "
                types = self._types.get(name, TEXT)
                return Value(self._index, f"{lead}{write_json(name)}: ", types)
            case Say() if self.end:
                return None
            case _:
                return TextUntil((PARAMETER, FUNCTION_END, self._closing_tag), drops_blank=True)
