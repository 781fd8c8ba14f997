"""A pull of pages that are being computed: the bytes to copy next."""

from collections.abc import Sequence

import numpy as np

from kvell.memory import GroupSpec
from kvell.mempool.transfers.actions import Pull
from kvell.mempool.transports.page_copies import Piece, parts_of, pieces_of
from kvell.pages.stages import BY_LAYER, join_stages, stages_of


class StagedPull:
    """The bytes of a pull, each returned once when it is written.

    :param pull: a pull with ``stages``; its pages are of one model.
    """

    def __init__(self, groups: Sequence[GroupSpec], pull: Pull) -> None:
        self._groups, self._rows = groups, pull.rows
        model = groups[pull.rows[0, 0]].model if len(pull.rows) else ""
        self._stages = stages_of(groups, model, pull.stages)
        self._given = 0

    def written(self, stage: int) -> list[Piece]:
        """Return the pieces to copy once the stages up to this one are written; often none."""
        until = min(stage + 1, len(self._stages))
        if until <= self._given:
            return []
        parts = join_stages(self._stages[self._given : until])
        self._given = until
        return parts_of(self._groups, self._rows, parts)

    def rest(self) -> list[Piece]:
        """Return the remaining pieces once all is written, with groups not written by layer.

        If no piece was returned before, whole pages are aggregated, as they are without stages.
        """
        if not self._given:
            return pieces_of(self._groups, self._rows)
        left = self.written(len(self._stages))
        beside = [i for i, group in enumerate(self._groups) if group.kind not in BY_LAYER]
        return left + pieces_of(self._groups, self._rows[np.isin(self._rows[:, 0], beside)])
