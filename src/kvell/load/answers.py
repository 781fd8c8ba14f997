"""One streamed answer from its client's view: pieces of text and their arrival times.

It supports the events of OpenAI's streams and fields of vLLM and others, and reads no clock.
"""

from typing import Any

import msgspec

from kvell.load.prompts import AnswerTokens
from kvell.wire.decoding import MalformedError, decode

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """A piece of a chat's answer; reasoning counts as content, since clients see it too."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """A piece of an answer of either endpoint."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class CachedTokens(msgspec.Struct):
    """The number of prompt tokens from the cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's counts of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(Chunk)
_ANY = msgspec.json.Decoder()


class AnswerReader:
    """An incremental reader of a stream's bytes.

    ``content_seconds`` are the times of events with text or token ids; for an answer whose
    tokens have no text, they are the times of all its events.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.last_seconds: float | None = None
        self.has_ended = False
        self._error: str | None = None
        self._rest = b""
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._content_seconds: list[float] = []
        self._silent_seconds: list[float] = []

    def feed(self, at_seconds: float, data: bytes) -> None:
        self.last_seconds = at_seconds
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(at_seconds, line[5:].strip())

    @property
    def content_seconds(self) -> list[float]:
        return self._content_seconds or self._silent_seconds

    @property
    def answer(self) -> AnswerTokens:
        return AnswerTokens("".join(self._texts), self._token_ids)

    @property
    def output_tokens(self) -> int:
        if self.usage is not None:
            return self.usage.completion_tokens
        return len(self._token_ids) or len(self.content_seconds)

    def problem(self) -> str | None:
        """Return the reason why the answer is incomplete; None if it is complete."""
        if self._error is not None:
            return self._error
        if not self.has_ended:
            return "the stream ended early"
        return None if self.content_seconds else "no tokens"

    def _take(self, at_seconds: float, payload: bytes) -> None:
        if payload == DONE:
            self.has_ended = True
            return
        try:
            chunk = decode(_DECODER, payload)
        except MalformedError:
            self._error = "an event that is not OpenAI's"
            return
        if chunk.error is not None:
            self._error = f"error event: {_message(chunk.error)}"
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            text = choice.text or (choice.delta.text if choice.delta else "")
            ids = choice.token_ids or []
            if text or ids:
                self._content_seconds.append(at_seconds)
                self._texts.append(text)
                self._token_ids += ids
            elif choice.delta is None or choice.finish_reason:
                self._silent_seconds.append(at_seconds)
            self.has_ended = self.has_ended or choice.finish_reason is not None


def _message(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)


def error_text(body: bytes) -> str:
    """Return the text of an error response's body, in one line of at most 300 characters."""
    try:
        raw = decode(_ANY, body)
    except MalformedError:
        raw = body.decode("utf-8", "replace")
    if isinstance(raw, dict):
        raw = raw.get("error") or raw.get("detail") or raw
    return " ".join(_message(raw).split())[:300]
