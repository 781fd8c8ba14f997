"""For code of transformers that asks a cache how many tokens came before.

A flattened step has no cache, but every token knows its position.  Llama 4 scales its
queries by position that way.
"""

from typing import Any

import torch

_ASKING = "attn_temperature_tuning"


def asks_a_cache(module: Any) -> bool:
    """Does a layer of the model take its positions from a cache?"""
    return any(getattr(child, _ASKING, False) for child in module.modules())


class TruePositions:
    """Stands in for a cache: it stores nothing and gives positions away.

    :param positions: int64 [T], each token's position in its own request.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        rows = torch.arange(len(positions), device=positions.device)
        self._before = positions - rows

    def get_seq_length(self, _layer: int = 0) -> torch.Tensor:
        """int64 [T]: what must be added to a row's number to make it its position."""
        return self._before

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's own keys and values: earlier ones are in pages."""
        return key, value
