"""Swap or recompute: the cost of both ways for a preempted request's tokens; pure.

Swapping copies bytes to the CPU buffer and back; recomputing computes tokens again. Both are
compared as bytes: how many could be copied while one token is computed.
"""

from dataclasses import dataclass

from kvell.cost.prices import InstancePrices

WAYS = 2
"""Copies of a swap: out, and in again."""

WINT8_PER_BYTE = {"cpu": 16, "cuda": 4096}
"""Weights that a token is multiplied with while a byte is copied, by device: two operations each,
at 400 GFLOP/s and 12 GB/s on a server's cores, and 200 TFLOP/s and 25 GB/s on a GPU."""


@dataclass
class SwapRule:
    """A decision for one request at a time: a fixed number of bytes is worth a token.

    :param most_bytes: copied, both ways together, for each token that is not computed again.
    """

    most_bytes: float

    def swaps(self, tokens: int, size_bytes: int) -> bool:
        """Return whether to copy ``size_bytes`` out and in instead of recomputing ``tokens``."""
        return tokens > 0 and WAYS * size_bytes <= tokens * self.most_bytes


def rule_of_weights(weights: int, device: str) -> SwapRule:
    """Return a rule for a model that multiplies a token with ``weights`` numbers."""
    return SwapRule(weights / WINT8_PER_BYTE[device])


def rule_of_prices(prices: InstancePrices) -> SwapRule | None:
    """Return the rule of a calibrated instance; None if its copies or tokens have no price."""
    most_bytes = prices.costs.token_seconds * prices.swap_bytes_per_second
    return SwapRule(most_bytes) if most_bytes > 0 else None
