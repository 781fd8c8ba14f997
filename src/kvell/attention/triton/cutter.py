"""The programs of the last few batches, so that all layers of a group share one cut."""

from kvell.attention.interface import GroupBatch, HostLengths
from kvell.attention.triton.held import HeldGroupBatch
from kvell.attention.triton.work import Tiling, Work, cut


class WorkCutter:
    """A cutter of batches that caches the work of the last ones."""

    _LIMIT = 16

    def __init__(self) -> None:
        self._cached: dict[int, tuple[GroupBatch, dict[Tiling, Work]]] = {}

    def work(self, batch: GroupBatch, tiling: Tiling) -> Work:
        """Return the programs of a batch under a tiling; a held batch brings its own.

        :raises ValueError: if a held batch has none for this tiling.
        """
        if isinstance(batch, HeldGroupBatch):
            return batch.work(tiling)
        works = self._works(batch)
        work = works.get(tiling)
        if work is None:
            work = works[tiling] = cut(host_lengths(batch), tiling, batch.page_ids.device)
        return work

    def tilings(self, batch: GroupBatch) -> tuple[Tiling, ...]:
        """Return the tilings that were asked for a batch, in order; none if it is forgotten.

        After a pass of a model these are all that its layers need of the batch's group.
        """
        if isinstance(batch, HeldGroupBatch):
            return tuple(batch.works)
        _, works = self._cached.get(id(batch), (batch, {}))
        return tuple(works)

    def _works(self, batch: GroupBatch) -> dict[Tiling, Work]:
        entry = self._cached.get(id(batch))  # a cached batch is alive, so its id is its own
        if entry is None:
            if len(self._cached) >= self._LIMIT:
                self._cached.pop(next(iter(self._cached)))
            entry = self._cached[id(batch)] = (batch, {})
        return entry[1]


def host_lengths(batch: GroupBatch) -> HostLengths:
    """Return the batch's lengths in host memory; wait for the device if ``host`` is None."""
    if batch.host is not None:
        return batch.host
    return HostLengths(
        batch.query_starts.cpu(),
        batch.context_lens.cpu(),
        batch.table_starts.cpu(),
        batch.first_positions.cpu(),
    )
