"""A model's pages, with which a service computes the same bits as the model's own pass.

The creditor's side: answers to debtors' query rows (Infinite-LLM §4).

::

    debtor's pass ── rows, rights ──► service: rights valid? ─► partials ─► still valid?
                  ◄── records m, e, o ──◄───────────────────────────────────────┘

A query names sections by their rights, never pages: the service reads the pages of a loan, and only
for its debtor. A query that cannot be read is answered as wrong, and a right that is revoked before
or after the reading makes its run invalid; neither raises.

The fence of a loan: its word is cleared first (:mod:`kvell.mempool.transports.rights`), then
:meth:`AttentionService.end` returns whether all reads of its pages have ended; only afterwards they
may get a new owner.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, cast

import numpy as np
import numpy.typing as npt

from kvell.attention.interface import AttentionKernels, LayerPages

if TYPE_CHECKING:
    from kvell.attention.native import NativeKernels


@dataclass(frozen=True)
class ServedLayer:
    """One layer of a model that attends to text.

    :param pages: of its keys and values.
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


class AttentionService:
    """Computes partials over pages that this instance lends.

    :param model: its layers; their pool must outlive the service.
    :param words: uint64 [n], the table of rights: the word at a right's remainder holds its number
        while it is valid. It is read at each query, and kept.
    """

    def __init__(self, model: ServedLayers, words: npt.NDArray[np.uint64]) -> None:
        from kvell.attention.native import layer_args
        from kvell.models.partials import _partials

        self._kept = (model, words)
        full = model.full_groups
        table: tuple[int, int] = (words.__array_interface__["data"][0], len(words))
        self._compiled = _partials.Service(
            model.instruction_set,
            [
                (layer_args(layer.pages), layer.group if layer.group in full else -1)
                for layer in model.layers
            ],
            table,
        )

    def lend(self, right: int, debtor: int, pages: Sequence[Sequence[int]]) -> None:
        """Let a debtor query one section, as long as its right is valid.

        :param pages: of each group of the layout, in order of position; none for a group without
            full attention.
        :raises ValueError: if they are not those of a section, or do not exist, or the right is
            lent already.
        """
        self._compiled.lend(right, debtor, pages)

    def end(self, right: int, patience_seconds: float = 0.0) -> bool:
        """Prevent further reads by a right; the caller has revoked its word.

        :returns: whether no read by it is in progress. If False after the patience, call again
            before the pages get a new owner.
        """
        return self._compiled.end(right, patience_seconds)

    @property
    def reading(self) -> int:
        """The number of sections that are being read at this moment."""
        return self._compiled.reading()

    @property
    def wrong(self) -> int:
        return self._compiled.wrong()

    def answer(self, debtor: int, query: bytes) -> bytes:
        """Answer one query, on any thread.

        :param query: as ``csrc/partials/message.h`` describes it.
        :returns: the answer, also to an unreadable query.
        """
        return self._compiled.answer(debtor, query)
