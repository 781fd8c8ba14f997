"""Swap or recompute: the cost of both ways for a preempted request's tokens; pure.

Swapping copies bytes to the CPU buffer and back; recomputing computes tokens again. Both are
compared as bytes: how many could be copied while one token is computed.
"""

from dataclasses import dataclass
from typing import Protocol

from kvell.cost.model import CostModel
from kvell.cost.work import Chunk

WAYS = 2
"""Copies of a swap: out, and in again."""

WINT8_PER_BYTE = {"cpu": 16, "cuda": 4096}
"""Weights that a token is multiplied with while a byte is copied, by device: two operations each,
at 400 GFLOP/s and 12 GB/s on a server's cores, and 200 TFLOP/s and 25 GB/s on a GPU."""


class SwapRule(Protocol):
    """A decision for one request at a time."""

    def swaps(self, tokens: int, size_bytes: int) -> bool:
        """Return whether to copy ``size_bytes`` out and in instead of recomputing ``tokens``."""
        ...


@dataclass(frozen=True)
class BytesPerToken:
    """A rule without a calibration: a fixed number of bytes is worth a token.

    :param most_bytes: copied, both ways together, for each token that is not computed again.
    """

    most_bytes: float

    def swaps(self, tokens: int, size_bytes: int) -> bool:
        """Implement :meth:`SwapRule.swaps`."""
        return tokens > 0 and WAYS * size_bytes <= tokens * self.most_bytes


def rule_of_weights(weights: int, device: str) -> BytesPerToken:
    """Return a rule for a model that multiplies a token with ``weights`` numbers.

    :param device: ``cpu`` or ``cuda``.
    """
    return BytesPerToken(weights / WINT8_PER_BYTE[device])


@dataclass(frozen=True)
class ByCost:
    """A rule that compares the seconds of a cost model.

    :param bytes_per_second: of the link between device and host, one way.
    :param most_tokens: computed in one step.
    """

    model: CostModel
    bytes_per_second: float
    most_tokens: int

    def swaps(self, tokens: int, size_bytes: int) -> bool:
        """Implement :meth:`SwapRule.swaps`; concurrent requests pay the fixed part of a step."""
        if tokens <= 0:
            return False
        starts = range(0, tokens, self.most_tokens)
        work = [Chunk(start, min(self.most_tokens, tokens - start)) for start in starts]
        idle_seconds = self.model.step_seconds([Chunk(0, 1)])
        recompute_seconds = sum(self.model.step_seconds([chunk]) for chunk in work)
        recompute_seconds -= idle_seconds * len(work)
        return WAYS * size_bytes / self.bytes_per_second <= recompute_seconds
