"""The records of a creditor's loans; loans that share pages have the same owner."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvell.memory import Ints
from kvell.mempool.exchanges import Exchange
from kvell.mempool.loans.counts import Counts
from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.transfers.messages import Transfer


@dataclass
class LentPages(Exchange):
    """One loan of this creditor.

    :ivar owner: the owner of the hold on its pages, common to loans that share them.
    :ivar rows: int32 [m, 2]: group, local page, in the order of groups.
    :ivar shares: whether it shares pages that are filled already.
    :ivar deadline: when it must be filled or returned.
    :ivar filling: the transfer that fills it.
    :ivar step_ticks: the duration of the debtor's steps, as reported.
    :ivar patience_ticks: the time that its recall left it.
    """

    owner: Owner
    counts: Counts
    rows: Ints
    right: Transfer
    shares: bool = False
    state: Literal["granted", "filling", "lent", "ending", "revoked"] = "granted"
    filling: Transfer | None = None
    step_ticks: Tick = 0
    patience_ticks: Tick = 0

    @property
    def has_pages(self) -> bool:
        return self.state != "revoked"

    @property
    def is_ending(self) -> bool:
        """Whether the pages come back without a further recall."""
        return self.state == "ending" or (self.state == "lent" and self.deadline is not None)


def pages_of(loans: Iterable[LentPages], num_groups: int) -> Counts:
    """Return the pages of each group of these loans; shared pages count once."""
    counts = {record.owner: record.counts for record in loans if record.has_pages}
    zero = np.zeros(num_groups, np.int64)
    return tuple(sum((np.asarray(pages) for pages in counts.values()), zero).tolist())


def rows_of(loans: Iterable[LentPages]) -> Ints:
    """Return int32 [m, 2]: group and page of all pages of these loans, each once."""
    rows = {record.owner: record.rows for record in loans if record.has_pages}
    return np.concatenate([np.empty((0, 2), np.int32), *rows.values()])


def together(lent: Mapping[Loan, LentPages]) -> list[list[Loan]]:
    """Return the loans with pages in the order of recall, grouped by shared pages.

    Loans that are not readable yet are first, then the youngest.
    """
    by_owner: dict[Owner, list[Loan]] = {}
    for loan, record in lent.items():
        if record.has_pages:
            by_owner.setdefault(record.owner, []).append(loan)
    youngest = list(reversed(by_owner.values()))
    return sorted(youngest, key=lambda loans: any(lent[loan].state == "lent" for loan in loans))
