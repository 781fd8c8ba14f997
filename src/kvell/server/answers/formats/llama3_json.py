"""Calls as Llama 3 writes them (vLLM's ``llama3_json``): the whole answer is JSON.

::

    <|python_tag|>{"name": "weather", "parameters": {"city": "Bern"}}; {"name": …}
"""

from kvell.server.answers.reading.json_calls import CallObject
from kvell.server.answers.reading.markers import Expect
from kvell.server.answers.reading.modes import Chain, Mode, PlainText

TAG, BETWEEN = "<|python_tag|>", ";"


class Llama3Json(Chain):
    """Calls from the first character on, or none."""

    def __init__(self) -> None:
        super().__init__(Expect(TAG, keeps_blank=True))

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case CallObject(begun=True):
                self._calls += 1
                return Expect(BETWEEN)
            case CallObject():
                return PlainText()
            case Expect(opening=opening) if opening or not self._calls:
                return CallObject(self._calls, opening)
            case _:
                return PlainText(drops_blank=True)
