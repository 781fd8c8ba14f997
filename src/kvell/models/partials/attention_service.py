"""The creditor's side: answers to debtors' query rows (Infinite-LLM §4).

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

import numpy as np
import numpy.typing as npt

from kvell.attention.native import layer_args
from kvell.models.partials import _partials
from kvell.models.partials.served_layers import ServedLayers


class AttentionService(_partials.Service):
    """Computes partials over pages that this instance lends; any thread may ask it.

    ``lend`` lets a debtor query one section as long as its right is valid: pages are those of each
    group of the layout, in order of position, and none for a group without full attention. It
    raises ValueError if they are not those of a section, or do not exist, or the right is lent
    already. ``end`` prevents further reads by a right whose word is revoked, and returns whether
    none is in progress; if some are after its seconds, call it again before the pages get a new
    owner. ``answer`` takes and returns what ``csrc/partials/message.h`` describes.

    :param model: its layers; their pool must outlive the service.
    :param words: uint64 [n], the table of rights: the word at a right's remainder holds its number
        while it is valid. It is read at each query, and kept.
    """

    def __init__(self, model: ServedLayers, words: npt.NDArray[np.uint64]) -> None:
        self._kept = (model, words)
        full = model.full_groups
        super().__init__(
            model.instruction_set,
            [
                (layer_args(layer.pages), layer.group if layer.group in full else -1)
                for layer in model.layers
            ],
            (words.__array_interface__["data"][0], len(words)),
        )
