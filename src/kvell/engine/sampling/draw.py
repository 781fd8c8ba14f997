"""Drawing of token ids from logits, with random numbers that depend on (seed, output position).

A row's token depends only on the row's logits and its :class:`RowSampling`:
re-runs, preemption and other requests in the batch do not change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.models.captured.device_step import first_largest
from kvell.vocabulary import NOT_NUMBERS

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class RowSampling:
    """The sampling of one row's token, with the ranges of ``SamplingParams``.

    :param top_p: 1 keeps all tokens; applies to the renormalised tokens that top_k keeps.
    :param position: output position, 0 for the first token after the prompt.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    position: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams, position: int) -> "RowSampling":
        """Return the sampling of a request's token.

        :param position: output position, 0 for the first token after the prompt.
        """
        if params.temperature == 0:
            return GREEDY
        seed = params.seed or 0
        drawn = params.temperature, params.top_k, params.top_p, seed, position, params.min_p
        return cls(*drawn)


GREEDY = RowSampling(0.0)
"""The sampling that takes the most likely token."""


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """Draw one token id per row; NOT_NUMBERS if a logit is NaN or the largest is infinite.

    :param logits: float32 [n, vocabulary]; ``-inf`` excludes a token.
    :param rows: n samplings; greedy rows take the first of the largest logits.
    :raises ValueError: if the numbers of rows and logits differ.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} rows for logits of {logits.shape[0]}")
    drawn = [index for index, row in enumerate(rows) if row.temperature > 0]
    if len(drawn) == len(rows):
        return [_draw(logits[index], rows[index]) for index in drawn]
    tokens = largest(logits)
    for index in drawn:
        tokens[index] = _draw(logits[index], rows[index])
    return tokens


def largest(logits: torch.Tensor) -> list[int]:
    """Return the index of the first largest logit of each row [n, vocabulary], or NOT_NUMBERS.

    On a CPU it uses numpy, which is about ten times faster here than torch.  In both, the argmax of
    a row with NaN is the first NaN, so a check of the largest number detects any.
    """
    if logits.device.type != "cpu":
        checked: list[int] = first_largest(logits).tolist()
        return checked
    rows = logits.numpy()
    where = np.argmax(rows, axis=-1)
    is_number = np.isfinite(rows[np.arange(len(rows)), where])
    tokens: list[int] = np.where(is_number, where, NOT_NUMBERS).tolist()
    return tokens


def uniform(seed: int, position: int) -> float:
    """Return the random number of (seed, position), in [0, 1), with 53 bits.

    Position ``i`` is the i-th output of a SplitMix64 generator whose state is the
    scrambled seed, so neighbouring seeds give unrelated streams.
    """
    state = _scramble(seed & _MASK)
    return float(_scramble(state + (position + 1) * _GOLDEN) >> 11) / float(1 << 53)


def _scramble(value: int) -> int:
    """Apply SplitMix64's finaliser, a bijection of 64 bits without visible structure."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _draw(logits: torch.Tensor, row: RowSampling) -> int:
    support = _support(logits, row)
    if support is None:
        return NOT_NUMBERS
    weights, tokens = support
    cumulative = weights.cumsum(0)
    total = cumulative[-1]
    point = total * uniform(row.seed, row.position)
    index = torch.searchsorted(cumulative, point, right=True)
    # If rounding raises the point to the total, take the last token with any weight.
    last = torch.searchsorted(cumulative, total)
    return int(tokens[torch.minimum(index, last)])


def _support(logits: torch.Tensor, row: RowSampling) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return weights (float64, not normalised) and ids of the candidate tokens, in id order.

    The result is None if a logit is NaN, or the largest is infinite.
    """
    tokens = _top_k(logits, row.top_k)
    kept = logits[tokens].double()
    peak = kept.max()  # NaN if any logit is
    if not peak.isfinite():
        return None
    weights = ((kept - peak) / row.temperature).exp()
    if row.min_p > 0.0:  # the largest weight is 1
        likely = weights >= row.min_p
        weights, tokens = weights[likely], tokens[likely]
    if row.top_p >= 1.0:
        return weights, tokens
    nucleus = _top_p(weights / weights.sum(), row.top_p)
    return weights[nucleus], tokens[nucleus]


def _top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the k largest logits, ascending; among equals the lower ids stay.

    Ids of NaN logits are always included.
    """
    size = logits.shape[0]
    if not 0 < k < size:
        return torch.arange(size, device=logits.device)
    threshold = torch.topk(logits, k).values[-1]
    above = (~(logits <= threshold)).nonzero().flatten()
    equal = (logits == threshold).nonzero().flatten()[: max(0, k - above.shape[0])]
    return torch.cat([above, equal]).sort().values


def _top_p(probabilities: torch.Tensor, p: float) -> torch.Tensor:
    """Return indices of the smallest set of tokens whose probability reaches p, ascending.

    Among equally likely tokens the lower indices stay.
    """
    # All tokens below (1-p)/size together weigh less than 1-p, so none of them is
    # in the set: only the others need sorting.
    floor = (1.0 - p) / probabilities.shape[0]
    candidates = (probabilities >= floor).nonzero().flatten()
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    return candidates[order[before < p]].sort().values
