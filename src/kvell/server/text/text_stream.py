"""Text of an instance's tokens: detokenisation, stop strings, and the end of requests."""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.errors import Bound, KvellError, RequestFailed, TryLater
from kvell.front.front import Front
from kvell.front.request_log import Output, OutputRoom, RequestTrace
from kvell.models.text.answer_text import AnswerText, EndTokens
from kvell.server.text.text_model import TextModel


class DeadlineExceeded(KvellError):  # noqa: N818
    """A request that did not end before its deadline."""


class RequestRefused(KvellError):  # noqa: N818
    """A permanent refusal of a request by the instance.

    :param message: reason, in one line.
    :param field: the request's field to change, or "".
    :param bound: the bound that the request exceeds, if any.
    """

    def __init__(self, message: str, field: str = "", bound: Bound | None = None) -> None:
        self.field, self.bound = field, bound
        super().__init__(message)


@dataclass(frozen=True)
class Usage:
    """The numbers of tokens of one request.

    :param cached_tokens: prompt tokens read from a cache.
    :param cache_write_tokens: prompt tokens written into the cache.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
        )


NO_USAGE = Usage()
"""The usage of all pieces of an answer but the last."""


@dataclass(frozen=True)
class TextDelta:
    """A piece of an answer; the last piece also has the finish reason and the usage.

    :param token_ids: tokens since the previous piece; their text may follow later.
    :param logprobs: log probabilities of each token, if requested.
    :param prompt_logprobs: those of the prompt's tokens from the second on, in the first piece.
    :param stop_reason: stop string or stop token that ended the answer, in the last piece; None
        for other ends.
    """

    text: str
    finish_reason: Literal["stop", "length"] | None = None
    usage: Usage = NO_USAGE
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    stop_reason: str | int | None = None


def answer_text(model: TextModel, spec: RequestSpec) -> AnswerText:
    """Return a new writer of one request's text."""
    sampling = spec.sampling
    ends = EndTokens(
        frozenset() if sampling.ignore_eos else model.eos_token_ids,
        frozenset(sampling.stop_token_ids),
        are_shown=sampling.include_stop_str_in_output,
    )
    skips = sampling.skip_special_tokens
    detokenizer = model.detokenizer(skip_special_tokens=skips, after=spec.token_ids)
    return AnswerText(detokenizer, sampling.stop, ends, sampling.min_tokens)


async def text_deltas(
    front: Front,
    model: TextModel,
    spec: RequestSpec,
    *,
    index: int = 0,
    deadline_seconds: float | None = None,
    trace: RequestTrace | None = None,
    room: OutputRoom | None = None,
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the pieces of a prompt's answer; closing the generator early cancels the request.

    :param index: index of the answer, which comes with each piece.
    :param deadline_seconds: time after which the request is cancelled.
    :param trace: observer of the request in the front.
    :param room: memory for the answer until it is sent; None: it is not counted.
    :raises TryLater: when there is no room or no instance now.
    :raises RequestRefused: when the instance can never serve the request.
    :raises RequestFailed: when the instance died during the request.
    :raises DeadlineExceeded: when the deadline has passed.
    """
    writer = answer_text(model, spec)
    outputs = front.generate(spec, deadline_seconds=deadline_seconds, trace=trace, room=room)
    pending: WholeAnswer | None = None
    clock: _Deadline | None = None
    if deadline_seconds is not None:
        clock = _Deadline(front, spec.request_id, deadline_seconds)
    async with aclosing(outputs), clock or nullcontext():
        async for output in outputs:
            count_before = writer.token_count
            text = writer.push(output.token_ids)
            if room is not None and text:
                room.add_text(text)
            delta = _piece(output, writer.token_count - count_before, text)
            if pending is not None:
                pending.push(delta)
            if output.finished is not None:
                if clock is not None:
                    clock.check(output.finished)
                last = _last_delta(writer, text, output.finished, spec.prompt_tokens)
                made = delta if pending is None else pending.delta()
                ids = tuple(made.token_ids)
                likely, scored = made.logprobs, made.prompt_logprobs
                yield index, replace(last, token_ids=ids, logprobs=likely, prompt_logprobs=scored)
                return
            if writer.stopped:
                front.stop(spec.request_id)
            if text and pending is not None:
                delta = pending.delta()
                delta = replace(delta, token_ids=tuple(delta.token_ids))
            if text:
                yield index, delta
                pending = None
            elif pending is None:  # many tokens may follow before their text does
                pending = WholeAnswer()
                pending.push(delta)


class _Deadline(AbstractAsyncContextManager[None]):
    """The timer that cancels a request at its deadline."""

    def __init__(self, front: Front, request_id: str, seconds: float) -> None:
        self._front, self._request_id, self._seconds = front, request_id, seconds
        self._is_over = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._cancel)

    async def __aexit__(self, *_error: object) -> None:
        self._timer.cancel()

    def check(self, finished: Finished) -> None:
        if self._is_over and finished.reason == "cancelled":
            raise DeadlineExceeded(f"deadline_seconds={self._seconds}: the answer took longer")

    def _cancel(self) -> None:
        self._is_over = True
        self._front.cancel(self._request_id)


def _piece(output: Output, taken: int, text: str) -> TextDelta:
    """Return the first ``taken`` tokens of ``output`` with their text."""
    token_ids, logprobs = output.token_ids, output.logprobs
    if taken < len(token_ids):
        token_ids, logprobs = token_ids[:taken], logprobs[:taken]
    scored = output.prompt_logprobs
    return TextDelta(text, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=scored)


class WholeAnswer:
    """A compact store of consecutive pieces of one answer, which grows in place."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids = array("i")
        self._logprobs, self._prompt_logprobs = KeptLogprobs(), KeptLogprobs()
        self._last = TextDelta("")

    def push(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._prompt_logprobs.extend(delta.prompt_logprobs)
        self._last = delta

    def delta(self) -> TextDelta:
        """Return all pieces as one."""
        return replace(
            self._last,
            text="".join(self._texts),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )


async def whole_answers(
    deltas: AsyncGenerator[tuple[int, TextDelta], None], count: int
) -> list[TextDelta]:
    answers = [WholeAnswer() for _ in range(count)]
    async with aclosing(deltas):
        async for index, delta in deltas:
            answers[index].push(delta)
    return [answer.delta() for answer in answers]


def _last_delta(writer: AnswerText, text: str, finished: Finished, prompt_tokens: int) -> TextDelta:
    if not writer.stopped:
        raise_unless_done(finished)
    text += writer.finish()
    cache = finished.cached_tokens, finished.cache_write_tokens
    usage = Usage(prompt_tokens, writer.token_count, *cache)
    if finished.reason == "length" and not writer.stopped:
        return TextDelta(text, "length", usage)
    return TextDelta(text, "stop", usage, stop_reason=writer.stop_reason)


def raise_unless_done(finished: Finished) -> None:
    """Raise the error of a request that ended without an answer.

    :raises TryLater: if there was no room.
    :raises RequestRefused: if the instance can never serve the request.
    :raises RequestFailed: if the request ended otherwise.
    """
    if finished.reason in ("stop", "length"):
        return
    if finished.reason == "refused" and finished.try_later:
        raise TryLater(finished.message, bound=finished.bound)
    if finished.reason == "refused" or finished.bound is not None or finished.field:
        # for the client to change
        raise RequestRefused(finished.message, finished.field, finished.bound)
    raise RequestFailed(finished.message or f"the request ended: {finished.reason}")


class UsageSoFar:
    """A running count of the tokens of several answers.

    :param prompt_tokens: length of each prompt; answers are numbered prompt by prompt.
    :param choices: answers per prompt.
    """

    def __init__(self, prompt_tokens: Sequence[int], choices: int) -> None:
        self._prompt_tokens, self._choices = prompt_tokens, choices
        self._made: dict[int, int] = {}

    def after(self, index: int, delta: TextDelta) -> Usage:
        made = self._made.get(index, 0) + len(delta.token_ids)
        self._made[index] = made
        return Usage(self._prompt_tokens[index // self._choices], made)
