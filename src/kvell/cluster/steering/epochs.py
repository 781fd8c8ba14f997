"""Which of several managers of one cluster is obeyed: the one with the highest epoch.

::

    starting ──finds a higher one──► rises above it ──all is taken over──► leads
                                                                            │ hears of a higher one
                                                                            ▼
                                                                          outranked

Whoever is ordered about remembers the highest epoch that it has seen, and refuses lower ones.  A
manager that starts takes a higher one than all that it finds, so it is newer than they are; one
that has started never rises, and an older one that goes on after a pause learns that from anybody.
"""

from collections.abc import Iterable
from typing import Literal

NUMBER_BITS = 16
"""The lower bits of an incarnation count the starts of one epoch."""

Standing = Literal["leads", "rose", "outranked"]


def epoch_of(incarnation: int) -> int:
    """Epoch of the manager that has started an incarnation."""
    return incarnation >> NUMBER_BITS


class HighestEpoch:
    """What whoever obeys remembers.

    :ivar epoch: the highest that it has seen; 0: of nobody.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._leader = ""

    def outranking(self, epoch: int, leader: str) -> int:
        """Take in the epoch of an order.

        :param leader: who gave it; where two took the same epoch, the first has it.  Epoch 0 is
            anybody's.
        :returns: 0 if the order is obeyed; else an epoch above the order's, for whoever gave it.
        """
        if epoch and epoch == self.epoch and leader != self._leader:
            return epoch + 1
        if epoch < self.epoch:
            return self.epoch
        self.epoch, self._leader = epoch, leader
        return 0

    def is_older(self, epoch: int) -> bool:
        """Whether an order is one of a manager that another has replaced."""
        return epoch < self.epoch


class Leadership:
    """What a manager knows of its own standing.

    :param floor: no epoch is lower: seconds of the calendar, so that a manager that finds nothing
        is still newer than those before it.
    :ivar epoch: its own.
    """

    def __init__(self, floor: int) -> None:
        self.epoch = max(1, floor)
        self.outranked_by = 0
        self._is_settled = False
        self._number = 0

    @property
    def is_outranked(self) -> bool:
        """Whether a newer manager leads."""
        return self.outranked_by > self.epoch

    def settle(self) -> None:
        """All that was found is taken over: from now on a higher epoch is a newer manager's."""
        self._is_settled = True

    def heard(self, epoch: int) -> Standing:
        """Take in an epoch that somebody has seen; "rose": all must be told the new one."""
        if self.is_outranked:
            return "outranked"
        if epoch <= self.epoch:
            return "leads"
        if self._is_settled:
            self.outranked_by = epoch
            return "outranked"
        self.epoch = epoch + 1
        return "rose"

    def found(self, incarnations: Iterable[int]) -> Standing:
        """Take in which incarnations run.

        Those of a newer manager have a higher epoch; before the first start of one's own, those of
        the same epoch are another's too.
        """
        highest = max(map(epoch_of, incarnations), default=0)
        return self.heard(highest if self._number or highest < self.epoch else highest + 1)

    def next_incarnation(self) -> int:
        """Of the next start; later ones of this epoch and all of higher ones are larger."""
        self._number += 1
        return (self.epoch << NUMBER_BITS) | (self._number & ((1 << NUMBER_BITS) - 1))
