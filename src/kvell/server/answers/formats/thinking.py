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
    """The tags around a model family's reasoning.

    :param opened: whether an unknown prompt counts as one that ends with ``start``.
    """

    start: str
    end: str
    opened: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Return whether a prompt, or its end, opens the reasoning of its answer."""
        return prompt.rstrip().endswith(self.start)

    def closed_by(self, prompt: str) -> bool:
        """Return whether a prompt has already closed the reasoning."""
        return prompt.rstrip().endswith(self.end)


DEEPSEEK_R1 = ThinkingTags("<think>", "</think>", opened=True)
QWEN3 = ThinkingTags("<think>", "</think>")
MISTRAL = ThinkingTags("[THINK]", "[/THINK]")


class Thinking(Chain):
    """Reasoning and the text after it.

    :param opened: whether the answer begins inside the tags; it may repeat the first tag.
    :param then: mode that reads the text after the reasoning.
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
