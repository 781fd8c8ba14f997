"""A model's pages, with which a service computes the same bits as the model's own pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from kvell.attention.interface import AttentionKernels, LayerPages

if TYPE_CHECKING:
    from kvell.attention.native import NativeKernels


@dataclass(frozen=True)
class ServedLayer:
    """One layer of a model that attends to text.

    :param pages: of its keys and values.
    :param group: index of its group in the layout.
    :param is_full: whether each token reads all tokens before it.
    """

    pages: LayerPages
    group: int
    is_full: bool


@dataclass(frozen=True)
class ServedLayers:
    """All layers of a model that attend to text, in order; a query names one by its index.

    Scales and soft caps of scores, and the dtype of rows, are those of each query, so a creditor
    needs only pages.

    :param instruction_set: of the kernels; those of another one round differently.
    """

    instruction_set: str
    layers: tuple[ServedLayer, ...]

    @classmethod
    def of(cls, kernels: AttentionKernels, layers: Iterable[ServedLayer]) -> Self | None:
        """Return a pass's layers; None if its kernels are not those of the service.

        Portable kernels round differently, and compiled ones cannot read vectors of all lengths.
        """
        if kernels.name != "native":
            return None
        return cls(cast("NativeKernels", kernels).instruction_set, tuple(layers))

    @property
    def full_groups(self) -> list[int]:
        """The groups of the layout whose sections may be remote, in order.

        All of their layers are full; with ``--manager paged`` layers with windows share a group.
        """
        local = {layer.group for layer in self.layers if not layer.is_full}
        return sorted({layer.group for layer in self.layers} - local)
