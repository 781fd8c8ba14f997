"""A vector in place of an answer: what a request asks for, and what it gets."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.sampling_params import SamplingParams

Pooling = Literal["", "last"]
"""What a request wants of its prompt: "" an answer; ``last`` the vector of its last token."""

POOLED = SamplingParams(temperature=0, max_tokens=1, seed=0, ignore_eos=True)
"""How the engine plans a request for a vector: as one for a single token, whose place the vector
takes.  So it ends with the step that computes the prompt's last token."""


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one prompt.

    :param prompt_token_ids: token ids of the prompt, with the special tokens that were added.
    :param embedding: of the prompt's last token, behind the model's final norm; of length one.
    :param cached_tokens: of the prompt, found in a cache.
    :param preemptions: how often the request gave up its pages and went on later.
    """

    prompt_token_ids: list[int]
    embedding: list[float]
    cached_tokens: int = 0
    preemptions: int = 0


def vector_of(embedding: bytes) -> NDArray[np.float32]:
    """The numbers of a vector as it travels, float32 ``[size]``."""
    return np.frombuffer(embedding, "<f4").astype(np.float32)
