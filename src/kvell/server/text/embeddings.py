"""Embedding vectors of prompts, from instances behind a front."""

from collections.abc import Sequence
from contextlib import aclosing

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.pooling import POOLED
from kvell.errors import RequestFailed
from kvell.front.front import Front
from kvell.server.text.several.side_by_side import all_served
from kvell.server.text.text_model import PreparedPrompt
from kvell.server.text.text_stream import outputs_of, raise_unless_done


async def embed(front: Front, prompt: PreparedPrompt) -> Finished:
    """Return the vector of a prompt; cancelling this call cancels the request.

    :raises TryLater: when there is no room or no instance now.
    :raises RequestRefused: when the instance can never serve the request.
    :raises RequestFailed: when the instances that computed it died, or it was stopped.
    """
    outputs = outputs_of(front, prompt, POOLED, pooling="last")
    async with aclosing(outputs):
        async for output in outputs:
            if output.finished is not None:
                raise_unless_done(output.finished)
                if output.finished.embedding:
                    return output.finished
    raise RequestFailed("the request was stopped before it had a vector")


async def all_embedded(front: Front, prompts: Sequence[PreparedPrompt]) -> list[Finished]:
    """Return the vectors of prompts, in their order; the first failure cancels the others."""
    return await all_served(front, prompts, lambda prompt: embed(front, prompt))
