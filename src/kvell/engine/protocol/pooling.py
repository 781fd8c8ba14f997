"""Pooling requests, which return the prompt's vector in place of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.equivalents.arguments import POOLING_OTHERS
from kvell.equivalents.other import refuses_unknown, show
from kvell.errors import ChangeSomething

EMBED = "embed"
"""vLLM's name of the task whose result is a vector."""

Pooling = Literal["", "last"]
"""The result of a request: "" an answer; ``last`` the vector of the prompt's last token."""

POOLED = SamplingParams(temperature=0, max_tokens=1, seed=0, ignore_eos=True)
"""The sampling parameters of a pooling request: the engine plans it as a request for one token,
so it ends with the step that computes the prompt's last token."""


@refuses_unknown(POOLING_OTHERS)
@dataclass(frozen=True)
class PoolingParams:
    """Parameters of a request for a prompt's vector, with vLLM's name.

    :param task: ``embed``, the only one; None means the same.
    :raises ChangeSomething: for another task.
    """

    task: str | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, EMBED):
            remedy = "use embed: models have no heads that classify, and keep no vectors of tokens"
            raise ChangeSomething("task", show(self.task), "is not served", remedy)


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one prompt.

    :param prompt_token_ids: token ids of the prompt, including added special tokens.
    :param embedding: vector of the prompt's last token after the model's final norm, of length 1.
    :param cached_tokens: prompt tokens that were cached.
    :param preemptions: number of times that the request was preempted.
    :param request_id: index of the prompt as text, or the request's id.
    :param finished: True: a vector is returned whole.
    """

    prompt_token_ids: list[int]
    embedding: list[float]
    cached_tokens: int = 0
    preemptions: int = 0
    request_id: str = "0"
    finished: bool = True

    @property
    def outputs(self) -> "EmbeddingOutput":
        """The output itself, which scripts for vLLM read as ``output.outputs.embedding``."""
        return self

    @property
    def data(self) -> NDArray[np.float32]:
        """The vector, float32 ``[hidden_size]``."""
        return np.asarray(self.embedding, np.float32)

    @property
    def hidden_size(self) -> int:
        """The number of the vector's numbers."""
        return len(self.embedding)

    @property
    def num_cached_tokens(self) -> int:
        """``cached_tokens``, by vLLM's name."""
        return self.cached_tokens


@dataclass(frozen=True)
class ScoringOutput:
    """The similarity of two texts.

    :param score: cosine of their vectors, from -1 to 1.
    :param prompt_token_ids: token ids of both texts, one after the other.
    :param request_id: index of the pair as text.
    :param finished: True: a score is returned whole.
    """

    score: float
    prompt_token_ids: list[int]
    request_id: str = "0"
    finished: bool = True

    @property
    def outputs(self) -> "ScoringOutput":
        """The output itself, which scripts for vLLM read as ``output.outputs.score``."""
        return self


def similarities(
    ones: Sequence[NDArray[np.float32]], others: Sequence[NDArray[np.float32]]
) -> list[float]:
    """Return the cosine of each pair of vectors (float32, of length one), from -1 to 1.

    :param ones: as many as ``others``, or one for all of them.
    """
    if len(ones) == 1:
        ones = [ones[0]] * len(others)
    dots = [float(np.dot(a.astype("f8"), b)) for a, b in zip(ones, others, strict=True)]
    return [min(max(dot, -1.0), 1.0) for dot in dots]


def vector_of(embedding: bytes) -> NDArray[np.float32]:
    """Return the numbers of ``Finished.embedding``, float32 ``[size]``."""
    return np.frombuffer(embedding, "<f4").astype(np.float32)
