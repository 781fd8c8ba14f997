"""Calls as GLM 4.5 to 4.7 write them (vLLM's ``glm45`` and ``glm47``).

::

    text <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Bern</arg_value>
    </tool_call>

Values of string parameters are streamed, others returned when they are complete.
"""

import re
from collections.abc import Mapping, Sequence

from kvell.engine.protocol.schemas.references import Schema
from kvell.server.answers.deltas import ToolCallArguments, ToolCallBegin
from kvell.server.answers.reading.json_calls import MOST_NAME_CHARS
from kvell.server.answers.reading.markers import Expect, TextUntil
from kvell.server.answers.reading.modes import SPACE, Chain, Mode, Say
from kvell.server.answers.reading.schema_values import TEXT, ParameterTypes
from kvell.server.answers.reading.tags import HeadUntil, Value
from kvell.wire.json_text import write_json

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE = "<arg_key>", "</arg_key>", "<arg_value>"
VALUE_END = "</arg_value>"
_NAME = re.compile(
    rf"[{SPACE}]{{0,64}}(?P<name>[^<>{{}}{SPACE}]{{1,{MOST_NAME_CHARS}}}?)[{SPACE}]{{0,64}}"
)
_KEY_NAME = re.compile(rf"(?P<name>[^<>]{{1,{MOST_NAME_CHARS}}}?)</arg_key>[{SPACE}]{{0,64}}")


class Glm45(Chain):
    """Text, then calls between tags, then text again."""

    def __init__(self, tools: Sequence[Schema] = ()) -> None:
        super().__init__(TextUntil((START,)))
        self._types = ParameterTypes(tools)

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case TextUntil():
                return HeadUntil("<", _NAME, ended.opening)
            case HeadUntil() if ended.name:
                return _Call(self._calls, ended.name, self._types.of(ended.name))
            case _Call():
                self._calls += 1
                return TextUntil((START,), drops_blank=True)
            case _:
                return TextUntil((START,))


class _Call(Chain):
    """A call after its name, up to its closing tag."""

    def __init__(self, index: int, name: str, types: Mapping[str, frozenset[str]]) -> None:
        super().__init__(Say(ToolCallBegin(index, name)))
        self._index, self._types = index, types
        self._lead = "{"
        self._is_closed = False
        self._key = ""

    def _next(self, ended: Mode) -> Mode | None:
        match ended:
            case Expect(marker="<arg_key>"):
                return HeadUntil("<arg_value>", _KEY_NAME, ended.opening)
            case HeadUntil() if ended.name:
                self._key = ended.name
                return Expect(VALUE)
            case Expect(marker="<arg_value>"):
                lead, self._lead = self._lead, ", "
                types = self._types.get(self._key, TEXT)
                return Value(self._index, f"{lead}{write_json(self._key)}: ", types, VALUE_END)
            case Say() if self._is_closed:
                return None
            case Say() | Value():
                return Expect(KEY, END)
            case Expect() | HeadUntil():  # the closing tag, or what is no parameter
                self._is_closed = True
                closing = "{}" if self._lead == "{" else "}"
                return Say(ToolCallArguments(self._index, closing))
            case _:
                return None
