"""Embedding vectors of prompts, from instances behind a front."""

from collections.abc import Sequence
from contextlib import aclosing
from itertools import zip_longest

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.errors import RequestFailed
from kvell.front.front import Front
from kvell.front.request_log import RequestTrace
from kvell.server.text.several.beam_search import all_served
from kvell.server.text.text_stream import raise_unless_done


async def embed(front: Front, spec: RequestSpec, trace: RequestTrace | None = None) -> Finished:
    """Return the vector of a prompt; cancelling this call cancels the request.

    :raises TryLater: when there is no room or no instance now.
    :raises RequestRefused: when the instance can never serve the request.
    :raises RequestFailed: when the instances that computed it died, or it was stopped.
    """
    outputs = front.generate(spec, trace=trace)
    async with aclosing(outputs):
        async for output in outputs:
            if output.finished is not None:
                raise_unless_done(output.finished)
                if output.finished.embedding:
                    return output.finished
    raise RequestFailed("the request was stopped before it had a vector")


async def all_embedded(
    front: Front, specs: Sequence[RequestSpec], traces: Sequence[RequestTrace] = ()
) -> list[Finished]:
    """Return the vectors of prompts, in their order; the first failure cancels the others.

    :param traces: an observer of each; empty: they are not observed.
    """
    pairs = list(zip_longest(specs, traces))
    return await all_served(front, pairs, lambda pair: embed(front, *pair))
