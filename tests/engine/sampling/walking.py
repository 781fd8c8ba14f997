"""Random walks over the tokens that a grammar allows."""

import random
from collections.abc import Iterable, Sequence

import numpy as np

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.grammars import Allowed, Grammars, MaskedRequest
from kvell.models.text.tokenizer import Tokenizer
from kvell.vocabulary import RequestId

VOCAB = 49_152
END = 2
MOST_TOKENS = 600
"""More than any walk below needs: its texts are bounded."""


def masked(handle: int, asked: StructuredOutputs, output: Sequence[int]) -> MaskedRequest:
    return MaskedRequest(RequestId(str(handle)), asked, np.array(output, np.int32))


def masks_of(grammars: Grammars, wanted: Sequence[MaskedRequest]) -> dict[int, Allowed | None]:
    return {int(name): mask for name, mask in grammars.masks(wanted).result(60.0).items()}


def release(grammars: Grammars, handles: Iterable[int]) -> None:
    grammars.answers.forget(RequestId(str(handle)) for handle in handles)


def allowed(
    grammars: Grammars, asked: StructuredOutputs, output: Sequence[int], handle: int = 1
) -> Allowed:
    mask = masks_of(grammars, [masked(handle, asked, output)])[handle]
    assert mask is not None
    assert mask.shape == (VOCAB,)
    return mask


def ids(mask: Allowed) -> list[int]:
    return [int(token) for token in np.flatnonzero(mask)]


def walk(grammars: Grammars, asked: StructuredOutputs, seed: int) -> list[int]:
    """Draw evenly among the allowed tokens until an end; without that end."""
    draw, output = random.Random(seed), list[int]()
    while len(output) < MOST_TOKENS:
        token = draw.choice(ids(allowed(grammars, asked, output)))
        if token == END:
            release(grammars, [1])
            return output
        output.append(token)
    raise AssertionError(f"no end after {MOST_TOKENS} tokens")


def text_of(tokenizer: Tokenizer, output: Sequence[int]) -> str:
    return tokenizer.decode(output, skip_special_tokens=False)
