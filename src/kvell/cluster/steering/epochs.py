"""Leader epochs: instances and fronts obey the manager with the highest epoch.

::

    starting ──finds a higher one──► rises above it ──all is taken over──► leads
                                                                            │ sees a higher one
                                                                            ▼
                                                                          outranked

A follower remembers the highest epoch that it has seen, and refuses lower ones.  A manager that
starts takes a higher epoch than all that it finds.  Once it has started it never rises, so an older
manager that continues after a pause is outranked by any follower.
"""

from collections.abc import Iterable
from typing import Literal

NUMBER_BITS = 16
"""The lower bits of an incarnation count the starts of one epoch."""

Standing = Literal["leads", "rose", "outranked"]


def epoch_of(incarnation: int) -> int:
    return incarnation >> NUMBER_BITS


class HighestEpoch:
    """The highest epoch that a follower has seen.

    :ivar epoch: that epoch; 0 before the first.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._leader = ""

    def outranking(self, epoch: int, leader: str) -> int:
        """Compare the epoch of an order with the highest one, and store it if it is obeyed.

        :param leader: sender of the order; if two take the same epoch, the first has it.  Any
            leader may use epoch 0.
        :returns: 0 if the order is obeyed; else an epoch above the order's, for its sender.
        """
        if epoch and epoch == self.epoch and leader != self._leader:
            return epoch + 1
        if epoch < self.epoch:
            return self.epoch
        self.epoch, self._leader = epoch, leader
        return 0


class Leadership:
    """The epoch of a manager, and whether a newer manager leads.

    :param floor: lowest epoch: seconds of the calendar, so that a manager that finds no instances
        is still newer than those before it.
    """

    def __init__(self, floor: int) -> None:
        self.epoch = max(1, floor)
        self.outranked_by = 0
        self._is_settled = False
        self._number = 0

    @property
    def is_outranked(self) -> bool:
        return self.outranked_by > self.epoch

    def settle(self) -> None:
        self._is_settled = True

    def on_epoch(self, epoch: int) -> Standing:
        """Handle an epoch that another process has seen; after "rose", send the new one to all."""
        if self.is_outranked:
            return "outranked"
        if epoch <= self.epoch:
            return "leads"
        if self._is_settled:
            self.outranked_by = epoch
            return "outranked"
        self.epoch = epoch + 1
        return "rose"

    def on_incarnations(self, incarnations: Iterable[int]) -> Standing:
        """Handle the incarnations that run.

        Those of a newer manager have a higher epoch.  Before this manager's first start, those of
        the same epoch are another manager's too.
        """
        highest = max(map(epoch_of, incarnations), default=0)
        return self.on_epoch(highest if self._number or highest < self.epoch else highest + 1)

    def next_incarnation(self) -> int:
        """Return the incarnation of the next start; it rises in an epoch, and with the epoch."""
        self._number += 1
        return (self.epoch << NUMBER_BITS) | (self._number & ((1 << NUMBER_BITS) - 1))
