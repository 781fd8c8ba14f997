"""One request that has sections at other instances, or is about to."""

from collections import deque
from dataclasses import dataclass, field

from kvell.engine.lending.sections import Place
from kvell.engine.requests.plan import NewPages, PageCopy
from kvell.engine.requests.request import Request
from kvell.mempool.loans.messages import Loan
from kvell.vocabulary import StepNumber

NO_STEP = StepNumber(0)


@dataclass
class Borrower:
    """A request with sections elsewhere, or on their way.

    :ivar creditors: to whom further sections go, in order.
    :ivar loans: of its first sections, in order; the first ``filled`` may be read.
    :ivar creditor_of: each loan.
    :ivar away: sections that its tables say are elsewhere; without pages, those that still are.
    :ivar recalled: the first section that must come home; None if none must.
    :ivar wanted_back: recalled sections that other creditors are to have; of these, ``replacing``
        have loans there, and ``replaced`` are filled.
    :ivar returning: pages that are still to be copied home, by their places.
    :ivar ends: loans that are given back with the result of step ``ends_with``, which may read
        them.
    """

    request: Request
    handle: int
    creditors: deque[str] = field(default_factory=deque)
    loans: list[Loan] = field(default_factory=list)
    creditor_of: dict[Loan, str] = field(default_factory=dict)
    filled: int = 0
    away: int = 0
    recalled: int | None = None
    wanted_back: set[int] = field(default_factory=set)
    replacing: dict[int, Loan] = field(default_factory=dict)
    replaced: set[int] = field(default_factory=set)
    returning: dict[Place, int] = field(default_factory=dict)
    ends: list[Loan] = field(default_factory=list)
    ends_with: StepNumber = NO_STEP

    @property
    def has_pages(self) -> bool:
        """Whether the request still holds what the loans belong to; a preempted one does not."""
        return self.request.handle == self.handle

    def starts_again(self, sections: int) -> None:
        """Its request has no pages here now, and of it only so many first sections."""
        self.away = self.filled = sections
        self.recalled = None
        self.creditors.clear()
        self.returning.clear()
        self.ends = []

    def copies_home(self, rows: NewPages) -> list[PageCopy]:
        """Return the copies for pages that it was given for what comes home.

        They are made last.  A page that was moved again in the same plan is the later one.

        :param rows: [m, 4] of a plan: handle, group, position, page.
        """
        own = rows[rows[:, 0] == self.handle]
        given = {(group, position): page for _, group, position, page in own.tolist()}
        found = [place for place in self.returning if place in given]
        return [PageCopy(place[0], self.returning.pop(place), given[place]) for place in found]
