"""Reasoning between tags (vLLM's ``deepseek_r1``, ``qwen3`` and ``mistral``), then the answer.

::

    <think>
    The user wants …
    </think>

    It rains.

Whitespace around the tags belongs to them.
"""

from dataclasses import dataclass

from kvell.server.answers.deltas import Content, Reasoning
from kvell.server.answers.reading.markers import Expect, TextUntil
from kvell.server.answers.reading.modes import Blank, Chain, Mode


@dataclass(frozen=True)
class ThinkingTags:
    """How a family marks reasoning.

    :param opened: the prompt is taken to end with ``start`` when nothing else is known.
    """

    start: str
    end: str
    opened: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins inside of the tags; its end is enough of it."""
        return prompt.rstrip().endswith(self.start)

    def closed_by(self, prompt: str) -> bool:
        """Whether a prompt has already ended the reasoning."""
        return prompt.rstrip().endswith(self.end)


DEEPSEEK_R1 = ThinkingTags("<think>", "</think>", opened=True)
QWEN3 = ThinkingTags("<think>", "</think>")
MISTRAL = ThinkingTags("[THINK]", "[/THINK]")


class Thinking(Chain):
    """Reasoning, and what follows.

    :param opened: the answer begins inside of the tags, whether or not it repeats the first.
    :param then: reads what follows.
    """

    def __init__(self, tags: ThinkingTags, *, opened: bool, then: Mode) -> None:
        make = Reasoning if opened else Content
        super().__init__(Expect(tags.start, make=make, keeps_blank=not opened))
        self._tags = tags
        self._opened = opened
        self._then = then

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case Expect() if ended.marker or self._opened:
                return TextUntil((self._tags.end,), Reasoning, drops_lead=True)
            case TextUntil():
                return Blank()
            case _:
                return self._then
