"""Ollama's answers: lines of a stream, and whole bodies."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kvell.server.answers.deltas import (
    AnswerDelta,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from kvell.server.api.bodies.completions import Body
from kvell.server.api.bodies.logprobs import LikelyTokens
from kvell.server.api.bodies.message_blocks import tool_input
from kvell.server.text.text_stream import Usage

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class Times:
    """The times of an answer, on a monotonic clock."""

    started_seconds: float
    first_seconds: float
    ended_seconds: float


@dataclass
class AnswerWriter:
    """The writer of one answer: lines of its parts, and the last line.

    :param model: name of the model, as the client wrote it.
    :param is_chat: whether lines have a message, as those of ``/api/chat``.
    :param keeps: whether the parts are kept, for :meth:`whole_body`.
    """

    model: str
    is_chat: bool
    keeps: bool = True
    _call: tuple[str, list[str]] | None = None
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: list[Body] = field(default_factory=list)
    _tokens: LikelyTokens = field(default_factory=LikelyTokens)

    def lines(self, parts: Sequence[AnswerDelta], tokens: LikelyTokens | None = None) -> list[Body]:
        """Return the lines of the next parts; a call has its line when it is complete.

        :param tokens: tokens since the last parts, for the first line; None for no log
            probabilities.
        """
        pieces: list[Body] = []
        for part in parts:
            match part:
                case Content(text):
                    pieces += [*self.close_call(), self._text("content", text)]
                case Reasoning(text):
                    pieces += [*self.close_call(), self._text("thinking", text)]
                case ToolCallBegin(_, name):
                    pieces += self.close_call()
                    self._call = name, []
                case ToolCallArguments(_, text):
                    assert self._call is not None, "a call begins before its arguments"
                    self._call[1].append(text)
        if not tokens:
            return [self._line(piece) for piece in pieces]
        first, *others = pieces or [{}]
        if self.keeps:
            self._tokens.append_tokens_of(tokens)
        line = {**self._line(first), "logprobs": tokens.to_list()}
        return [line, *(self._line(piece) for piece in others)]

    def last_lines(self, reason: str, usage: Usage, times: Times) -> list[Body]:
        calls = [self._line(piece) for piece in self.close_call()]
        return [*calls, {**self._line({}), **ending(reason, usage, times)}]

    def whole_body(self, reason: str, usage: Usage, times: Times) -> Body:
        self.close_call()
        pieces: Body = {name: "".join(texts) for name, texts in self._texts.items()}
        if self._calls:
            pieces["tool_calls"] = self._calls
        probabilities: Body = {"logprobs": self._tokens.to_list()} if self._tokens else {}
        return {**self._line(pieces), **probabilities, **ending(reason, usage, times)}

    def load_body(self) -> Body:
        return {**self._line({}), "done": True, "done_reason": "load"}

    def close_call(self) -> list[Body]:
        if self._call is None:
            return []
        name, arguments = self._call
        self._call = None
        call = {"function": {"name": name, "arguments": tool_input("".join(arguments))}}
        if self.keeps:
            self._calls.append(call)
        return [{"tool_calls": [call]}]

    def _text(self, kind: str, text: str) -> Body:
        if self.keeps:
            self._texts.setdefault(kind, []).append(text)
        return {kind: text}

    def _line(self, piece: Body) -> Body:
        head = {"model": self.model, "created_at": timestamp(time.time())}
        if self.is_chat:
            message = {"role": "assistant", "content": "", **piece}
            return {**head, "message": message, "done": False}
        content = piece.get("content", "")
        rest = {name: value for name, value in piece.items() if name != "content"}
        return {**head, "response": content, **rest, "done": False}


def ending(reason: str, usage: Usage, times: Times) -> Body:
    """Return the last fields of an answer; durations are in nanoseconds."""
    return {
        "done": True,
        "done_reason": reason,
        "total_duration": nanoseconds(times.started_seconds, times.ended_seconds),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(times.started_seconds, times.first_seconds),
        "eval_count": usage.completion_tokens,
        "eval_duration": nanoseconds(times.first_seconds, times.ended_seconds),
    }


def timestamp(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(begin_seconds: float, end_seconds: float) -> int:
    return max(0, round((end_seconds - begin_seconds) * NANOSECONDS))
