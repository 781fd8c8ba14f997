"""The loans that a debtor may read, and notices to its user."""

from dataclasses import dataclass

from kvell.mempool.loans.counts import Counts
from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Tick


@dataclass(frozen=True)
class ReadableLoan:
    """A loan that may be read while the creditor's right for it is valid.

    :ivar incarnation: the creditor's incarnation.
    :ivar right: the number of the creditor's right.
    :ivar pages: the creditor's pages of each group, in the order in which they were filled.
    :ivar deadline: when the creditor takes them, in ticks of this instance; None: not recalled.
    """

    creditor: str
    incarnation: int
    right: int
    pages: tuple[Counts, ...]
    deadline: Tick | None


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
