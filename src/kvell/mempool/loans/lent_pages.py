"""The loans of a creditor, as it keeps them: those over the same pages have one owner."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvell.memory import Ints
from kvell.mempool.loans.counts import Counts
from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.repeating import Repeated


@dataclass
class LentPages:
    """One loan of this creditor.

    :ivar owner: of the hold on its pages, which loans that share them have in common.
    :ivar rows: int32 [m, 2]: group, own page, in the order of groups.
    :ivar shares: whether its pages were another loan's, so that they are filled already.
    :ivar deadline: until which it must be filled, or given back; None: there is none.
    :ivar filling: the transfer by which it is being filled.
    :ivar unanswered: a ``Recall``.
    :ivar step_ticks: how long the debtor's steps take, as it says.
    :ivar patience_ticks: that its recall left it.
    """

    owner: Owner
    counts: Counts
    rows: Ints
    right: Transfer
    deadline: Tick | None
    shares: bool = False
    state: Literal["granted", "filling", "lent", "ending", "revoked"] = "granted"
    filling: Transfer | None = None
    unanswered: Repeated | None = None
    step_ticks: Tick = 0
    patience_ticks: Tick = 0

    @property
    def has_pages(self) -> bool:
        """Whether it has not been revoked."""
        return self.state != "revoked"

    @property
    def is_ending(self) -> bool:
        """Whether its pages come back without a recall."""
        return self.state == "ending" or (self.state == "lent" and self.deadline is not None)


def pages_of(loans: Iterable[LentPages], num_groups: int) -> Counts:
    """Pages of each group that these loans have; those that are shared count once."""
    counts = {one.owner: one.counts for one in loans if one.has_pages}
    zero = np.zeros(num_groups, np.int64)
    return tuple(sum((np.asarray(one) for one in counts.values()), zero).tolist())


def together(lent: Mapping[Loan, LentPages]) -> list[list[Loan]]:
    """The loans that have pages, as they are recalled: those that share pages together.

    First the ones that nobody reads yet, then the youngest.
    """
    found: dict[Owner, list[Loan]] = {}
    for loan, one in lent.items():
        if one.has_pages:
            found.setdefault(one.owner, []).append(loan)
    youngest = list(reversed(found.values()))
    return sorted(youngest, key=lambda loans: any(lent[one].state == "lent" for one in loans))
