"""The loans that a debtor may read, and notices to its user."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Tick

Counts = tuple[int, ...]
"""The number of pages of each group, or the pages of a group."""
UNKNOWN = "there is no such loan"
RECALLED = "it was recalled"


def decode_counts(encoded: bytes, num_groups: int) -> Counts | None:
    """Return the counts of all groups, or None unless all are valid and one is positive."""
    if len(encoded) != 4 * num_groups:
        return None
    counts = np.frombuffer(encoded, "<i4")
    if not len(counts) or counts.min() < 0 or not counts.any():
        return None
    return tuple(counts.tolist())


def decode_pages(encoded: bytes, num_pages: int) -> list[int] | None:
    """Return page numbers, or None unless there are ``num_pages`` and none is negative."""
    if len(encoded) != 4 * num_pages:
        return None
    pages = np.frombuffer(encoded, "<i4")
    return None if len(pages) and pages.min() < 0 else pages.tolist()


def by_group(pages: Sequence[int], counts: Counts) -> tuple[Counts, ...]:
    """Return the same pages, separated by group."""
    ends = np.cumsum(counts).tolist()
    return tuple(tuple(pages[end - n : end]) for end, n in zip(ends, counts, strict=True))


@dataclass(frozen=True)
class LoanGranted:
    """A notice that pages are lent, to be filled before the user's deadline."""

    loan: Loan


@dataclass(frozen=True)
class LoanFilled:
    """A notice that the loan may be read. The user owns the source pages again."""

    loan: Loan


@dataclass(frozen=True)
class LoanRefused:
    """A notice that no pages are lent, with the reason."""

    loan: Loan
    why: str


@dataclass(frozen=True)
class LoanLost:
    """A notice that lent pages are lost, with the reason. The user owns the source pages again."""

    loan: Loan
    why: str


@dataclass(frozen=True)
class LoanRecalled:
    """A notice that the creditor takes the pages at a deadline, in ticks of this instance.

    They may be read until then.  The user returns them before, or receives :class:`LoanLost`.
    """

    loan: Loan
    deadline: Tick


LoanNews = LoanGranted | LoanFilled | LoanRefused | LoanLost | LoanRecalled
