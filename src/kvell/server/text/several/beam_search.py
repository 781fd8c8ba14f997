"""A beam search over a front: a step submits a request for one token for each beam."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from msgspec import structs

from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs, count_numbers
from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.beam_search import Beam, BeamSearch
from kvell.errors import InstanceDied, RequestFailed, TryLater
from kvell.front.front import Front
from kvell.front.request_log import OutputRoom, RequestTrace
from kvell.server.text.text_model import TextModel
from kvell.server.text.text_stream import (
    DeadlineExceeded,
    TextDelta,
    Usage,
    answer_text,
    raise_unless_done,
)
from kvell.vocabulary import RequestId

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_AT_ONCE = 128
"""The most concurrent requests of one client, which leaves room in the queue for other clients."""


async def all_served(
    front: Front, items: Sequence[Item], serve: Callable[[Item], Awaitable[Result]]
) -> list[Result]:
    """Serve each item by its own request; return the results in the order of the items.

    The first failure cancels the others.  At most as many requests run concurrently as the front
    has room for at the start.  A request that finds no room reduces their number and is retried,
    so a list fails for lack of room only if there is none at all.
    """
    results: dict[int, Result] = {}
    left = deque(enumerate(items))
    working = max(1, min(MOST_AT_ONCE, len(items), front.room))

    async def work() -> None:
        nonlocal working
        try:
            while left:
                index, item = left.popleft()
                results[index] = await serve(item)
        except TryLater as error:
            if working == 1 or isinstance(error, InstanceDied):
                raise
            left.appendleft((index, item))  # for another worker
        finally:
            working -= 1

    workers = [asyncio.create_task(work()) for _ in range(working)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[index] for index in range(len(items))]


TOKENS_PER_BEAM = 4
"""Tokens of an answer that take as much memory as a beam's token and its place in the search."""


@dataclass(frozen=True)
class _FirstToken:
    """The log probabilities of a beam's next token, and of the prompt's tokens if requested."""

    finished: Finished
    logprobs: TokenLogprobs
    prompt_logprobs: Sequence[TokenLogprobs]


async def beam_deltas(
    front: Front,
    model: TextModel,
    spec: RequestSpec,
    search: BeamSearch,
    num_answers: int,
    *,
    first_index: int = 0,
    deadline_seconds: float | None = None,
    trace: RequestTrace | None = None,
    room: OutputRoom | None = None,
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the best ``num_answers`` answers, each as one piece with its index.

    Closing or cancelling the generator cancels all beams.

    :param first_index: index of the best answer.
    :param deadline_seconds: time after which the search is cancelled.
    :param trace: observer of all requests of the search.
    :param room: memory for the beams and the answers; None: it is not counted.
    :raises TryLater: when there is no room or no instance now.
    :raises RequestRefused: when the instance can never serve the request.
    :raises RequestFailed: when the instances that computed a beam died.
    :raises DeadlineExceeded: when the deadline has passed.
    """
    first, search = await _searched(front, spec, search, deadline_seconds, trace, room)
    for index, beam in enumerate(search.finished[:num_answers]):
        answer = _answer(model, spec, beam, first)
        if room is not None:
            room.add_text(answer.text)
            room.grow(len(answer.token_ids), count_numbers(answer.logprobs))
        yield first_index + index, answer


async def _searched(
    front: Front,
    spec: RequestSpec,
    search: BeamSearch,
    seconds: float | None,
    trace: RequestTrace | None,
    room: OutputRoom | None,
) -> tuple[_FirstToken, BeamSearch]:
    """Return the log probabilities of the first step, and the completed search."""
    due_seconds = None if seconds is None else front.now_seconds() + seconds
    params = replace(search.sampling(), prompt_logprobs=spec.sampling.prompt_logprobs)
    first = None
    left_seconds = seconds
    prompts = dict.fromkeys(search.running, spec.prompt)
    try:
        async with asyncio.timeout(seconds) as clock:
            while first is None or not search.is_over:
                if due_seconds is not None:
                    left_seconds = max(0.0, due_seconds - front.now_seconds())
                extended = _extended(spec, params, prompts)
                beams = await all_served(
                    front, extended, partial(_next_token, front, left_seconds, trace)
                )
                search = search.after([beam.logprobs for beam in beams])
                if room is not None:
                    shown = search.params.logprobs
                    numbers = 0 if shown is None else len(beams) * (1 + shown)
                    room.grow(TOKENS_PER_BEAM * len(beams), numbers)
                prompts = {beam: _prompt(beam, prompts) for beam in search.running}
                if first is None:  # the prompt's log probabilities are needed once
                    first = beams[0]
                    params = search.sampling()
    except TimeoutError:
        if clock.expired():
            raise DeadlineExceeded(f"deadline_seconds={seconds}: the answer took longer") from None
        raise
    return first, search


def _prompt(beam: Beam, prompts: Mapping[Beam, bytes]) -> bytes:
    """Return the prompt for a beam's next token.

    :param prompts: the prompts of the beams that were extended.
    """
    assert beam.parent is not None
    return prompts[beam.parent] + to_token_bytes([beam.last_token])


def _extended(
    spec: RequestSpec, sampling: SamplingParams, prompts: Mapping[Beam, bytes]
) -> list[RequestSpec]:
    """Return the requests for the next token of each beam."""
    return [
        structs.replace(
            spec,
            prompt=prompt,
            request_id=RequestId(f"{spec.request_id}-{beam.length}-{index}"),
            sampling=sampling,
        )
        for index, (beam, prompt) in enumerate(prompts.items())
    ]


async def _next_token(
    front: Front, deadline_seconds: float | None, trace: RequestTrace | None, spec: RequestSpec
) -> _FirstToken:
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs = KeptLogprobs()
    generated = front.generate(spec, deadline_seconds=deadline_seconds, trace=trace)
    async with aclosing(generated) as outputs:
        async for output in outputs:
            logprobs += output.logprobs
            prompt_logprobs.extend(output.prompt_logprobs)
            if output.finished is not None:
                raise_unless_done(output.finished)
                if logprobs:
                    return _FirstToken(output.finished, logprobs[0], prompt_logprobs)
    raise RequestFailed("the request was stopped before its beams had ended")


def _answer(model: TextModel, spec: RequestSpec, beam: Beam, first: _FirstToken) -> TextDelta:
    writer = answer_text(model, spec)
    token_ids = beam.token_ids
    text = writer.push(token_ids) + writer.finish()
    return TextDelta(
        text,
        beam.finish_reason,
        Usage(
            spec.prompt_tokens,
            beam.length,
            first.finished.cached_tokens,
            first.finished.cache_write_tokens,
        ),
        token_ids,
        () if spec.sampling.logprobs is None else beam.logprobs,
        first.prompt_logprobs,
    )
