"""Calls between tags: a list of calls, or one call, as JSON or as Python.

::

    text <|tool_call|>[{"name": "weather", "arguments": {"city": "Bern"}}, …]        granite
    text <tool_calls>[{"name": "weather", "arguments": {"city": "Bern"}}, …]</tool_calls>     jamba
    text <|tool_call|>[{"type": "function", "function": {"name": …}}]<|/tool_call|>  phi4_mini_json

    text <function_calls>weather(city="Bern")
    add(a=1, b=[2, 3])</function_calls>                                              olmo3
    text <|tool_call_start|>[weather(city="Bern"), add(a=1, b=2)]<|tool_call_end|>   lfm2

The names of the parsers are vLLM's.
"""

from kvell.server.answers.formats.pythonic import PythonCall
from kvell.server.answers.reading.json_calls import CallObject
from kvell.server.answers.reading.markers import Expect, TextUntil
from kvell.server.answers.reading.modes import Chain, Mode

LIST, MORE, LIST_END = "[", ",", "]"
GRANITE = (("<|tool_call|>", "<tool_call>"), ("</tool_call>",))
JAMBA = (("<tool_calls>",), ("</tool_calls>",))
LFM2 = (("<|tool_call_start|>",), ("<|tool_call_end|>",))
OLMO3 = (("<function_calls>",), ("</function_calls>",))
PHI4_MINI = (("<|tool_call|>", "functools"), ("<|/tool_call|>",))


class TaggedList(Chain):
    """Text, then calls between tags, then text again.

    :param tags: the tags that may precede the calls, and those that may follow.
    :param call: the reader of a call.  Python calls may follow each other without commas.
    """

    def __init__(
        self,
        tags: tuple[tuple[str, ...], tuple[str, ...]],
        call: type[CallObject] | type[PythonCall] = CallObject,
    ) -> None:
        self._starts, self._ends = tags
        self._call = call
        super().__init__(TextUntil(self._starts))

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case TextUntil():
                return Expect(LIST, before=ended.opening)
            case Expect(marker="[" | ","):
                return self._call(self._calls, ended.opening)
            case Expect(marker="]"):
                return Expect(*self._ends)
            case Expect(marker="", before=before) if before or self._call is PythonCall:
                return self._call(self._calls, before)
            case CallObject(begun=True) | PythonCall(begun=True):
                self._calls += 1
                return Expect(MORE, LIST_END, *self._ends)
            case CallObject() | PythonCall():
                return TextUntil(self._starts)
            case _:
                return TextUntil(self._starts, drops_blank=True)
