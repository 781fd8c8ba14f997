"""The activation memory of a step's forward pass, and a fixed reserve that grants it.

The reserve is for engines whose KV cache has a pool of its own; if both share one pool,
:class:`kvell.elastic.memory.ElasticMemory` grants. In both cases a step requests the bytes it will
need, gets them as a whole or not at all, and returns them with its result.

::

    IDLE ──grant(need ≤ capacity)──► GRANTED ──release──► IDLE
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

REMEMBERED_NEEDS = 1024
"""Number of step sizes whose needs are cached."""


class ActivationNeed(Protocol):
    """Bytes of activations that a step needs; more tokens or rows never need less."""

    def need_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Return the peak of a step of ``num_tokens`` that computes ``num_rows`` rows of logits."""
        ...


@dataclass(frozen=True)
class StepBuffers:
    """A step's buffers, one after another: not an estimate, but their exact size.

    :param fixed_bytes: of buffers that do not grow with the step, a multiple of the alignment.
    :param by_token_bytes: by buffer, for each token of the step.
    :param by_row_bytes: by buffer, for each row of logits.
    :param align_bytes: alignment of each buffer's start.
    """

    fixed_bytes: int
    by_token_bytes: tuple[int, ...]
    by_row_bytes: tuple[int, ...]
    align_bytes: int

    def need_bytes(self, num_tokens: int, num_rows: int) -> int:
        sizes = [num_tokens * size for size in self.by_token_bytes]
        sizes += [num_rows * size for size in self.by_row_bytes]
        align = self.align_bytes
        return self.fixed_bytes + sum(-(-size // align) * align for size in sizes)


@dataclass(frozen=True)
class LargestNeed:
    """The need of several models that use the same memory in turn."""

    needs: tuple[ActivationNeed, ...]

    def need_bytes(self, num_tokens: int, num_rows: int) -> int:
        return max(need.need_bytes(num_tokens, num_rows) for need in self.needs)


@dataclass(frozen=True)
class ActivationModel:
    """Bytes of activations a step needs, linear in its tokens and logit rows."""

    fixed_bytes: int
    token_bytes: int
    logits_row_bytes: int

    def need_bytes(self, num_tokens: int, num_rows: int) -> int:
        return self.fixed_bytes + num_tokens * self.token_bytes + num_rows * self.logits_row_bytes


class RememberedNeed:
    """A cache of another need's results: a step is mostly like the one before it."""

    def __init__(self, need: ActivationNeed) -> None:
        self.need_bytes = lru_cache(REMEMBERED_NEEDS)(need.need_bytes)


class ActivationArena:
    """Activation memory of one engine: a capacity, and the granted part of it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.granted_bytes = 0
        self.peak_bytes = 0

    def grant(self, need_bytes: int) -> bool:
        """Reserve ``need_bytes`` for a step; return False if they are not free."""
        if self.granted_bytes + need_bytes > self.capacity_bytes:
            return False
        self.granted_bytes += need_bytes
        self.peak_bytes = max(self.peak_bytes, self.granted_bytes)
        return True

    def release(self, need_bytes: int) -> None:
        """Return the bytes that a grant reserved.

        :raises ValueError: for more bytes than are granted.
        """
        if need_bytes > self.granted_bytes:
            raise ValueError(f"{need_bytes} bytes were not granted")
        self.granted_bytes -= need_bytes


SAFETY = 100
"""θ reserves one chunk in this many, in addition to the next growth of the decodes."""


def threshold_chunks(decode_growth_chunks: int, total_chunks: int) -> int:
    """Return θ: next step's predicted growth of the decodes, and 1 % of all chunks."""
    return decode_growth_chunks + -(-total_chunks // SAFETY)
