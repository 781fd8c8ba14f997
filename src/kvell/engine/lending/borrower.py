"""One request that has sections at other instances, or is about to."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvell.engine.lending.sections import Place
from kvell.engine.requests.plan import NewPages, PageCopy
from kvell.engine.requests.request import Request
from kvell.mempool.loans.messages import Loan
from kvell.vocabulary import StepNumber

NO_STEP = StepNumber(0)
MOST_LATE_STEPS = 3


@dataclass
class Borrower:
    """A request with sections elsewhere, or on their way.

    :ivar creditors: to whom further sections go, in order.
    :ivar loans: of its first sections, in order; the first ``filled`` may be read.
    :ivar creditor_of: each loan.
    :ivar by_queries: whether creditors are asked for attention over what is away; else it is read
        in place.
    :ivar late: steps in a row that creditors did not answer in time, and ``late_at``: the tokens
        that were computed then.
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
    by_queries: bool = False
    late: int = 0
    late_at: int = -1
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

    def next_is_computed(self, section_tokens: int) -> bool:
        """Whether the next section can go: it is complete, and not the last one."""
        end = (len(self.loans) + 1) * section_tokens
        return self.recalled is None and end <= self.request.settled

    def end_with(self, step: StepNumber, loans: Sequence[Loan]) -> None:
        """Note loans that are given back once a step is over."""
        self.ends += loans
        self.ends_with = step

    def take_ends(self, done: StepNumber) -> list[Loan]:
        """Return the loans that no step reads any more.

        :param done: the latest step that is over.
        """
        if self.returning or done < self.ends_with:
            return []
        ends, self.ends = self.ends, []
        return ends

    def asks_again(self) -> bool:
        """Creditors did not answer in time; returns whether they are asked again in the next step.

        Not after ``MOST_LATE_STEPS`` in a row: then what they lend is computed anew.
        """
        if self.request.settled != self.late_at:
            self.late, self.late_at = 0, self.request.settled
        self.late += 1
        return self.by_queries and self.late <= MOST_LATE_STEPS

    def starts_again(self, sections: int) -> None:
        """Its request has no pages here now, and of it only so many first sections."""
        self.away = self.filled = sections
        self.recalled = None
        self.creditors.clear()
        self.returning.clear()
        self.ends = []

    def audit(self, section_tokens: int) -> list[str]:
        """Every contradiction in what is away, a sentence for each."""
        found, name = list[str](), self.request.request_id
        if self.has_pages and self.away * section_tokens != self.request.away_tokens:
            found.append(f"{name}: {self.request.away_tokens} tokens are away")
        kept = 0 if self.has_pages else self.away * section_tokens
        if self.request.kept_tokens != kept:
            found.append(f"{name}: {self.request.kept_tokens} tokens are kept, not {kept}")
        if not self.away <= self.filled <= len(self.loans):
            found.append(f"{name}: {self.away} sections away of {self.filled} filled")
        if self.away * section_tokens >= max(1, self.request.num_tokens):
            found.append(f"{name}: its last section is away")
        return found

    def copies_home(self, rows: NewPages) -> list[PageCopy]:
        """Return the copies for pages that it was given for what comes home.

        They are made last.  A page that was moved again in the same plan is the later one.

        :param rows: [m, 4] of a plan: handle, group, position, page.
        """
        own = rows[rows[:, 0] == self.handle]
        given = {(group, position): page for _, group, position, page in own.tolist()}
        found = [place for place in self.returning if place in given]
        return [PageCopy(place[0], self.returning.pop(place), given[place]) for place in found]
