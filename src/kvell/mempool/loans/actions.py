"""Notices to a debtor's user about its loans."""

from dataclasses import dataclass

from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Tick


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
