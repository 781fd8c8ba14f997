"""Python calls between tags: Olmo 3's (vLLM's ``olmo3``) and LFM 2's lists.

::

    text <function_calls>weather(city="Bern")
    add(a=1, b=[2, 3])</function_calls>

    text <|tool_call_start|>[weather(city="Bern"), add(a=1, b=2)]<|tool_call_end|> text
"""

from kvell.server.answers.formats.pythonic import PythonCall
from kvell.server.answers.reading.markers import Expect, TextUntil
from kvell.server.answers.reading.modes import Chain, Mode

OLMO3 = ("<function_calls>", "</function_calls>")
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
LIST, MORE, LIST_END = "[", ",", "]"


class PythonCalls(Chain):
    """Text, then calls between tags, on lines or in a list, then text again."""

    def __init__(self, tags: tuple[str, str]) -> None:
        self._start, self._end = tags
        super().__init__(TextUntil((self._start,)))

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case TextUntil():
                return Expect(LIST, before=ended.opening)
            case PythonCall(begun=True):
                self._calls += 1
                return Expect(MORE, LIST_END, self._end)
            case Expect() if ended.marker == self._end:
                return TextUntil((self._start,), drops_blank=True)
            case Expect(marker="]"):
                return Expect(self._end)
            case Expect(marker="[" | ","):
                return PythonCall(self._calls, ended.opening)
            case Expect():
                return PythonCall(self._calls, ended.before)
            case _:
                return TextUntil((self._start,))
