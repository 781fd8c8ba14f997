"""Pooling requests, which return the prompt's vector in place of an answer."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.sampling_params import SamplingParams

Pooling = Literal["", "last"]
"""The result of a request: "" an answer; ``last`` the vector of the prompt's last token."""

POOLED = SamplingParams(temperature=0, max_tokens=1, seed=0, ignore_eos=True)
"""The sampling parameters of a pooling request: the engine plans it as a request for one token,
so it ends with the step that computes the prompt's last token."""


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one prompt.

    :param prompt_token_ids: token ids of the prompt, including added special tokens.
    :param embedding: vector of the prompt's last token after the model's final norm, of length 1.
    :param cached_tokens: prompt tokens that were cached.
    :param preemptions: number of times that the request was preempted.
    """

    prompt_token_ids: list[int]
    embedding: list[float]
    cached_tokens: int = 0
    preemptions: int = 0


def vector_of(embedding: bytes) -> NDArray[np.float32]:
    """Return the numbers of ``Finished.embedding``, float32 ``[size]``."""
    return np.frombuffer(embedding, "<f4").astype(np.float32)
