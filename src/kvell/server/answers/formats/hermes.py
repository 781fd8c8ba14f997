"""Calls as Hermes and Qwen 2, 2.5 and 3 write them (vLLM's ``hermes``).

::

    text <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>
"""

from kvell.server.answers.reading.json_calls import CallObject
from kvell.server.answers.reading.markers import Expect, TextUntil
from kvell.server.answers.reading.modes import Chain, Mode

START, END = "<tool_call>", "</tool_call>"


class Hermes(Chain):
    """Text, then calls between tags, then text again."""

    def __init__(self) -> None:
        super().__init__(TextUntil((START,)))

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case TextUntil():
                return CallObject(self._calls, ended.opening)
            case CallObject(begun=True):
                self._calls += 1
                return Expect(END)
            case CallObject():
                return TextUntil((START,))
            case _:
                return TextUntil((START,), drops_blank=True)
