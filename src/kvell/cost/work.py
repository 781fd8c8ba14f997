"""What a step computes for a request, as cost models see it."""

from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """Tokens ``start … start + count - 1`` of a request (``engine.plan.TokenWork`` is one)."""

    @property
    def start(self) -> int:
        """Tokens of the request that are computed already."""
        ...

    @property
    def count(self) -> int:
        """Tokens computed in the step."""
        ...

    @property
    def num_logits(self) -> int:
        """How many of them give logits."""
        ...


@dataclass(frozen=True)
class Chunk:
    """Work by itself: see :class:`Work`."""

    start: int
    count: int
    num_logits: int = 1
