"""The work of a step for one request, for cost models."""

from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """The tokens ``start … start + count - 1`` of a request (``engine.plan.TokenWork`` is one)."""

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
        """Number of these tokens that give logits."""
        ...


@dataclass(frozen=True)
class Chunk:
    """Plain record of a :class:`Work`."""

    start: int
    count: int
    num_logits: int = 1
