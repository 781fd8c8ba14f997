"""One loan, as its creditor keeps it."""

from dataclasses import dataclass
from typing import Literal

from kvell.memory import Ints
from kvell.mempool.loans.counts import Counts
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.repeating import Repeated


@dataclass
class LentPages:
    """One loan of this creditor.

    :ivar rows: int32 [m, 2]: group, own page, in the order of groups.
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
