"""What a debtor's user hears of its loans."""

from dataclasses import dataclass

from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Tick


@dataclass(frozen=True)
class LoanGranted:
    """Pages are lent, and wait to be filled until the user's deadline."""

    loan: Loan


@dataclass(frozen=True)
class LoanFilled:
    """The loan may be read; the pages that it was filled from are the user's again."""

    loan: Loan


@dataclass(frozen=True)
class LoanRefused:
    """Nothing was lent, and why."""

    loan: Loan
    why: str


@dataclass(frozen=True)
class LoanLost:
    """Pages that were lent are gone, and why; those to fill them from are the user's again."""

    loan: Loan
    why: str


@dataclass(frozen=True)
class LoanRecalled:
    """The creditor takes the pages at a deadline, in ticks of this instance.

    They may be read until then.  The user gives them back before, or hears :class:`LoanLost`.
    """

    loan: Loan
    deadline: Tick


LoanNews = LoanGranted | LoanFilled | LoanRefused | LoanLost | LoanRecalled
