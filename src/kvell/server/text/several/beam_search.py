"""A beam search over a front: a step submits a request for one token for each beam."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from kvell.engine.protocol.logprobs import TokenLogprobs, concatenate
from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.beam_search import Beam, BeamSearch
from kvell.errors import RequestFailed
from kvell.front.front import Front
from kvell.server.text.several.side_by_side import all_served
from kvell.server.text.text_model import PreparedPrompt, TextModel
from kvell.server.text.text_stream import (
    DeadlineExceeded,
    TextDelta,
    Usage,
    answer_text,
    outputs_of,
    raise_unless_done,
)


@dataclass(frozen=True)
class _Told:
    """The log probabilities of a beam's next token, and of the prompt's tokens if requested."""

    finished: Finished
    logprobs: TokenLogprobs
    prompt_logprobs: Sequence[TokenLogprobs]


async def beam_deltas(
    front: Front,
    model: TextModel,
    prompt: PreparedPrompt,
    sampling: SamplingParams,
    search: BeamSearch,
    made: Callable[[int], None],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the best ``sampling.n`` answers, each as one piece.

    Closing or cancelling the generator cancels all beams.

    :param made: called with the number of tokens of each step.
    :raises TryLater: when there is no room or no instance now.
    :raises RequestRefused: when the instance can never serve the request.
    :raises RequestFailed: when the instances that computed a beam died.
    :raises DeadlineExceeded: when the prompt's deadline has passed.
    """
    first, search = await _searched(front, prompt, sampling, search, made)
    for index, beam in enumerate(search.finished[: sampling.n]):
        yield index, _answer(model, prompt, sampling, beam, first)


async def _searched(
    front: Front,
    prompt: PreparedPrompt,
    sampling: SamplingParams,
    search: BeamSearch,
    made: Callable[[int], None],
) -> tuple[_Told, BeamSearch]:
    """Return the log probabilities of the first step, and the completed search."""
    seconds = prompt.deadline_seconds
    due_seconds = None if seconds is None else front.now_seconds() + seconds
    params, first = replace(search.sampling(), prompt_logprobs=sampling.prompt_logprobs), None
    try:
        async with asyncio.timeout(seconds) as clock:
            while first is None or not search.is_over:
                if due_seconds is not None:
                    left = max(0.0, due_seconds - front.now_seconds())
                    prompt = replace(prompt, deadline_seconds=left)
                beams = await _step(front, prompt, params, search.running)
                made(len(beams))
                search = search.after([beam.logprobs for beam in beams])
                if first is None:  # the prompt's log probabilities and trace are needed once
                    first, params, prompt = beams[0], search.sampling(), replace(prompt, trace=None)
    except TimeoutError:
        if clock.expired():
            raise DeadlineExceeded(f"deadline_seconds={seconds}: the answer took longer") from None
        raise
    return first, search


async def _step(
    front: Front, prompt: PreparedPrompt, sampling: SamplingParams, beams: Sequence[Beam]
) -> list[_Told]:
    """Request the next token of each beam."""
    prompts = [
        replace(
            prompt,
            token_ids=np.concatenate([prompt.token_ids, np.array(beam.token_ids, np.int32)]),
            request_id=f"{prompt.request_id}-{len(beam.token_ids)}-{index}",
        )
        for index, beam in enumerate(beams)
    ]
    return await all_served(front, prompts, lambda extended: _told(front, extended, sampling))


async def _told(front: Front, prompt: PreparedPrompt, sampling: SamplingParams) -> _Told:
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    async with aclosing(outputs_of(front, prompt, sampling)) as outputs:
        async for output in outputs:
            logprobs += output.logprobs
            prompt_logprobs = concatenate(prompt_logprobs, output.prompt_logprobs)
            if output.finished is not None:
                raise_unless_done(output.finished)
                if logprobs:
                    return _Told(output.finished, logprobs[0], prompt_logprobs)
    raise RequestFailed("the request was stopped before its beams had ended")


def _answer(
    model: TextModel, prompt: PreparedPrompt, sampling: SamplingParams, beam: Beam, first: _Told
) -> TextDelta:
    writer = answer_text(model, sampling, prompt)
    text = writer.push(beam.token_ids) + writer.finish()
    tokens = len(beam.token_ids)
    return TextDelta(
        text,
        beam.finish_reason,
        Usage(
            len(prompt.token_ids),
            tokens,
            first.finished.cached_tokens,
            first.finished.cache_write_tokens,
        ),
        beam.token_ids,
        () if sampling.logprobs is None else beam.logprobs,
        first.prompt_logprobs,
    )
