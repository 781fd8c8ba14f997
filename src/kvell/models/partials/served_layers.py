"""A model's pages, with which a service computes the same bits as the model's own pass."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, cast

from kvell.attention.interface import AttentionKernels, LayerPages

if TYPE_CHECKING:
    from kvell.attention.native import NativeKernels


@dataclass(frozen=True)
class ServedLayer:
    """One layer of a model that attends to text.

    :param pages: the pages of its keys and values.
    :param group: index of its group among those of its model, or of the layout.
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

    :param instruction_set: the instruction set of the kernels; others round differently.
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

    def in_groups(self, groups: Sequence[int]) -> Self:
        """Return the same layers with other indices of groups.

        :param groups: the new index of each group, such as the layout's index of each of the
            model's own groups.
        """
        layers = (replace(layer, group=groups[layer.group]) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def full_groups(self) -> list[int]:
        """The groups whose sections may be remote, in order.

        All of their layers are full; with ``--manager paged`` layers with windows share a group.
        """
        local = {layer.group for layer in self.layers if not layer.is_full}
        return sorted({layer.group for layer in self.layers} - local)
