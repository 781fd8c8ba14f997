"""The unnormalised softmax of query rows over a part of their context, in torch."""

from dataclasses import dataclass
from typing import Self

import torch

from kvell.attention.interface import Partial


@dataclass(frozen=True)
class SoftmaxState:
    """Softmax of one tile's rows: T tokens × group query heads of each kv head, token by token.

    :param maximum: float32 [kv_heads, T·group], the largest score; -inf where nothing was read.
    :param denominator: float32 [kv_heads, T·group], the sum of exp(score - maximum).
    :param output: float32 [kv_heads, T·group, output_size], the sum of exp(score - maximum)·v.
    """

    maximum: torch.Tensor
    denominator: torch.Tensor
    output: torch.Tensor

    @classmethod
    def of_record(cls, record: torch.Tensor, kv_heads: int) -> Self:
        """Build a state from a record: float32 [T, heads, 2 + output_size]."""
        tokens, heads, size = record.shape
        rows = record.reshape(tokens, kv_heads, heads // kv_heads, size).transpose(0, 1)
        rows = rows.flatten(1, 2)
        return cls(rows[..., 0].contiguous(), rows[..., 1].contiguous(), rows[..., 2:].contiguous())

    def record(self, tokens: int) -> torch.Tensor:
        """Return the state as a record to send: float32 [T, heads, 2 + output_size]."""
        numbers = torch.stack((self.maximum, self.denominator), 2)
        return _by_token(torch.cat((numbers, self.output), 2), tokens)

    def then(self, later: Self) -> Self:
        """Fold the part that follows into this one (Infinite-LLM eq. 3)."""
        maximum = torch.maximum(self.maximum, later.maximum)
        keep, add = _shrink(self.maximum, maximum), _shrink(later.maximum, maximum)
        return type(self)(
            maximum,
            self.denominator * keep + later.denominator * add,
            self.output * keep[..., None] + later.output * add[..., None],
        )

    def normalise(self, tokens: int) -> Partial:
        """Return the rows as [T, heads] and [T, heads, output_size], 0 if they read nothing."""
        divisor = torch.where(self.denominator == 0, 1.0, self.denominator)
        return Partial(
            _by_token(self.output / divisor[..., None], tokens),
            _by_token(self.maximum[..., None], tokens)[..., 0],
            _by_token(self.denominator[..., None], tokens)[..., 0],
        )


def _by_token(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Transpose [kv_heads, T·group, size] → [T, heads, size]."""
    kv_heads, count, size = rows.shape
    return rows.reshape(kv_heads, tokens, count // tokens, size).transpose(0, 1).flatten(1, 2)


def _shrink(maximum: torch.Tensor, new_maximum: torch.Tensor) -> torch.Tensor:
    """Return exp(maximum - new_maximum), or 0 where this part read nothing (also if both did)."""
    return torch.where(maximum == -torch.inf, 0.0, torch.exp(maximum - new_maximum))
