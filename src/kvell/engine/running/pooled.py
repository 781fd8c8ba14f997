"""Vectors of prompts: the rows of a step that give one, and its computation from hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvell.engine.requests.plan import TokenWork

LEAST_LENGTH = 1e-12
"""The shortest vector that is normalised: the direction of a shorter one would be noise."""


@dataclass(frozen=True)
class PooledRows:
    """The rows of a step's logits that give a vector, and their handles."""

    rows: tuple[int, ...] = ()
    handles: tuple[int, ...] = ()

    def vectors(self, hidden: torch.Tensor) -> dict[int, bytes]:
        """Return vectors of length 1 by handle, as little-endian float32 bytes.

        A vector with NaN or infinite numbers is empty.

        :param hidden: the head's input of all rows of logits, float32 [n, size].
        """
        chosen = hidden[list(self.rows)].float().cpu()
        ones = torch.nn.functional.normalize(chosen, dim=-1, eps=LEAST_LENGTH).numpy()
        made = (
            vector.astype("<f4").tobytes() if np.isfinite(vector).all() else b"" for vector in ones
        )
        return dict(zip(self.handles, made, strict=True))


NOTHING_POOLED = PooledRows()


def pooled_rows(work: Sequence[TokenWork]) -> PooledRows:
    """Return the last row of each work that pools."""
    rows, end = list[tuple[int, int]](), 0
    for item in work:
        end += item.num_logits
        if item.pools:
            rows.append((end - 1, item.handle))
    return PooledRows(tuple(row for row, _ in rows), tuple(handle for _, handle in rows))
