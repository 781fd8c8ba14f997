"""Parameters of a compiled pass's attention, with which a service computes the same bits."""

from dataclasses import dataclass

import torch

from kvell.attention.interface import LayerPages


@dataclass(frozen=True)
class ServedLayer:
    """One layer of a model.

    :param pages: of its keys and values.
    :param rule: scale and soft cap of its scores, and its window in tokens (0: none).
    :param group: index of its group in the layout.
    """

    pages: LayerPages
    rule: tuple[float, float, int]
    group: int

    @property
    def is_full(self) -> bool:
        """Whether each token reads all tokens before it, so that sections may be remote."""
        return self.rule[2] == 0


@dataclass(frozen=True)
class ServedLayers:
    """All layers of a model, in order.

    :param instruction_set: of the kernels; those of another one round differently.
    :param dtype: of queries, float32 or bfloat16.
    """

    instruction_set: str
    dtype: torch.dtype
    heads: int
    layers: tuple[ServedLayer, ...]

    @property
    def full_groups(self) -> list[int]:
        """The groups of the layout whose sections may be remote, in order."""
        return sorted({layer.group for layer in self.layers if layer.is_full})
