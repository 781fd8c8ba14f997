"""Vectors of prompts: which rows of a step give one, and how it is made of what the head reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvell.engine.requests.plan import TokenWork

LEAST_LENGTH = 1e-12
"""A shorter vector is not made longer: its direction would be noise."""


@dataclass(frozen=True)
class PooledRows:
    """Rows of logits of a step that give a vector, and the handles they belong to."""

    rows: tuple[int, ...] = ()
    handles: tuple[int, ...] = ()

    def vectors(self, hidden: torch.Tensor) -> dict[int, bytes]:
        """The vectors by handle, of length one, as little-endian float32 bytes.

        Empty where a number is NaN or infinite.

        :param hidden: of all rows of logits, float32 [n, size].
        """
        chosen = hidden[list(self.rows)].float().cpu()
        ones = torch.nn.functional.normalize(chosen, dim=-1, eps=LEAST_LENGTH).numpy()
        made = (one.astype("<f4").tobytes() if np.isfinite(one).all() else b"" for one in ones)
        return dict(zip(self.handles, made, strict=True))


NOTHING_POOLED = PooledRows()


def pooled_rows(work: Sequence[TokenWork]) -> PooledRows:
    """The last row of each work that pools."""
    found, end = list[tuple[int, int]](), 0
    for one in work:
        end += one.num_logits
        if one.pools:
            found.append((end - 1, one.handle))
    return PooledRows(tuple(row for row, _ in found), tuple(handle for _, handle in found))
