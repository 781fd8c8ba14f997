"""Reasoning between tags (vLLM's ``deepseek_r1``, ``qwen3`` and ``mistral``), then the answer.

::

    <think>
    The user wants …
    </think>

    It rains.

Whitespace around the tags belongs to them.  A call with which the answer ends, ends the reasoning
too: models begin calls before they close their reasoning.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvell.server.answers.deltas import AnswerDelta, Content, Reasoning, ToolCallBegin
from kvell.server.answers.reading.markers import Expect, TextUntil, possible_start
from kvell.server.answers.reading.modes import SPACE, Blank, Chain, Mode, Say, Step

MOST_TRIALS = 16
"""The most beginnings of calls in an answer's reasoning that are read as calls: each that is none
is read again as reasoning."""


@dataclass(frozen=True)
class ThinkingTags:
    """The tags around a model family's reasoning.

    :param opened: whether an unknown prompt counts as one that ends with ``start``.
    """

    start: str
    end: str
    opened: bool = False

    def opened_by(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.start)

    def closed_by(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.end)

    def last_tag(self, message: str) -> str:
        start, end = message.rfind(self.start), message.rfind(self.end)
        if start > end:
            return self.start
        return self.end if end >= 0 or message.strip(SPACE) else ""


DEEPSEEK_R1 = ThinkingTags("<think>", "</think>", opened=True)
QWEN3 = ThinkingTags("<think>", "</think>")
MISTRAL = ThinkingTags("[THINK]", "[/THINK]")
SEED_OSS = ThinkingTags("<seed:think>", "</seed:think>")
GRANITE = ThinkingTags("Here is my thought process:", "Here is my response:")
GEMMA4 = ThinkingTags("<|channel>thought", "<channel|>")


class Thinking(Chain):
    """Reasoning and the text after it.

    :param opened: whether the answer begins inside the tags; it may repeat the first tag.
    :param make_then: makes the mode that reads the text after the reasoning.
    :param calls: texts with which a call begins that ends the reasoning; without them none does.
    """

    def __init__(
        self,
        tags: ThinkingTags,
        *,
        opened: bool,
        make_then: Callable[[], Mode],
        calls: tuple[str, ...] = (),
    ) -> None:
        make = Reasoning if opened else Content
        super().__init__(Expect(tags.start, make=make, keeps_blank=not opened))
        self._tags = tags
        self._opened = opened
        self._make_then, self._call_starts = make_then, calls
        self._trials = 0

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case Expect() if ended.marker or self._opened:
                return self._reasoning(drops_lead=True)
            case TextUntil() if ended.marker == self._tags.end:
                return Blank()
            case TextUntil():
                self._trials += 1
                tag = self._tags.end
                return CallTrial(self._make_then(), ended.opening, ended.marker, tag)
            case CallTrial(is_closed=True):
                return Blank()
            case CallTrial():
                return Say(Reasoning(ended.opening))
            case Say():
                return self._reasoning()
            case _:
                return self._make_then()

    def _reasoning(self, *, drops_lead: bool = False) -> TextUntil:
        left = self._call_starts if self._trials < MOST_TRIALS else ()
        return TextUntil((self._tags.end,), Reasoning, drops_lead=drops_lead, left=left)


class CallTrial:
    """A possible call in the reasoning, held back: it is one if the answer ends with it.

    If it can be none, all but ``opening`` is left to the next mode; if the reasoning ends behind it
    (``is_closed``), it is a part of the reasoning.

    :param opening: the marker with the whitespace before it.
    """

    def __init__(self, mode: Mode, opening: str, marker: str, end: str) -> None:
        self._mode, self.opening, self._marker, self._end = mode, opening, marker, end
        self._held: list[str] = []
        self._tail = ""
        self._deltas: list[AnswerDelta] = []
        self.is_closed = False

    def push(self, text: str) -> Step:
        text = self._tail + text
        at = text.find(self._end)
        keep = at if at >= 0 else possible_start(text, (self._end,))
        self._tail = text[keep:]
        self._take(text[:keep])
        if self._deltas and not self._is_call():
            return [], "".join(self._held).removeprefix(self._marker) + self._tail
        if at < 0:
            return [], None
        self.is_closed = True
        return [self._thought()], text[at + len(self._end) :]

    def finish(self) -> list[AnswerDelta]:
        self._take(self._tail)
        self._deltas += self._mode.finish()
        return self._deltas if self._is_call() else [self._thought()]

    def _take(self, text: str) -> None:
        if text:
            self._held.append(text)
            self._deltas += self._mode.push(text)[0]

    def _is_call(self) -> bool:
        return bool(self._deltas) and isinstance(self._deltas[0], ToolCallBegin)

    def _thought(self) -> Reasoning:
        thought = self.opening.removesuffix(self._marker) + "".join(self._held)
        return Reasoning(thought.rstrip(SPACE) if self.is_closed else thought)
