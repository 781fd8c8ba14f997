"""Gives positions to transformers' code that asks a cache how many tokens came before.

A flattened step has no cache, but every token has its position.  Llama 4 scales its
queries by position this way.
"""

from typing import Any

import torch

_ASKING = "attn_temperature_tuning"


def asks_a_cache(module: Any) -> bool:
    """Whether a layer of the model takes its positions from a cache."""
    return any(getattr(child, _ASKING, False) for child in module.modules())


class TruePositions:
    """Stands in for a cache: stores nothing and only reports positions.

    :param positions: int64 [T], each token's position in its own request.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        rows = torch.arange(len(positions), device=positions.device)
        self._before = positions - rows

    def get_seq_length(self, _layer: int = 0) -> torch.Tensor:
        """int64 [T]: the difference between each row's position and its index."""
        return self._before

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step's own keys and values; earlier ones are in pages."""
        return key, value
