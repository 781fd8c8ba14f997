"""The loans of borrowing requests: one for each section, and where its pages are."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from kvell.engine.lending.borrower import Borrower
from kvell.engine.lending.sections import Place, Sections
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.requests.plan import BorrowedPages, NewPages
from kvell.mempool.agent import Agent
from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action

GRANT_TICKS: Tick = 30_000
"""How long a creditor keeps room for a section that it has granted and not been offered yet."""


class SectionLoans:
    """Which loan is whose section; asks for them, fills them, and gives them back.

    :param agent: of the instance.
    :ivar section_tokens: that go at once.
    :ivar step_ticks: how long the last steps took, the longest of some.
    """

    def __init__(self, agent: Agent, section_tokens: int) -> None:
        self._agent, self._loans = agent, agent.loans.borrowing
        self._core = agent.core
        self.section_tokens, self.step_ticks = section_tokens, 0
        self._borrowers: dict[Loan, Borrower] = {}
        self._begun_at: Tick = agent.now

    @property
    def instance(self) -> str:
        """The debtor."""
        return self._agent.instance

    def begin_step(self) -> None:
        """A step is about to be planned; the one before has ended."""
        took_ticks = self._agent.now - self._begun_at
        self.step_ticks = max(took_ticks, self.step_ticks * 7 // 8)
        self._begun_at = self._agent.now

    def borrower(self, loan: Loan) -> Borrower | None:
        """Return whose section a loan has; None if that is over."""
        return self._borrowers.get(loan)

    def ask(self, borrower: Borrower, creditor: str) -> tuple[Loan, list[Action]]:
        """Ask for room for a section; the answer comes as news, even one that is known at once."""
        model = borrower.request.model
        counts = self._sections(borrower).page_counts()
        loan, actions = self._loans.borrow(
            creditor, counts, self._agent.now, GRANT_TICKS, model=model
        )
        borrower.creditor_of[loan] = creditor
        self._borrowers[loan] = borrower
        return loan, actions

    def share(self, borrower: Borrower, other: Loan, ticks: Tick) -> tuple[Loan, list[Action]]:
        """Ask for the pages of a loan that stands once more; the answer comes as news.

        :param ticks: within which it must come.
        """
        creditor, _ = self._loans.creditor_of(other)
        loan, actions = self._loans.share(other, self._agent.now, ticks, step_ticks=self.step_ticks)
        borrower.creditor_of[loan] = creditor
        self._borrowers[loan] = borrower
        return loan, actions

    def is_readable(self, loan: Loan) -> bool:
        """Whether attention can read what a creditor lends, in place or by asking it.

        All sections of a request are read in one of the two ways.
        """
        creditor, borrower = self._loans.creditor_of(loan), self._borrowers[loan]
        asks, reads = creditor in self._agent.answering, creditor in self._agent.neighbours
        if not borrower.away:
            borrower.by_queries = asks
        return asks if borrower.by_queries else reads

    def let_pull(self, borrower: Borrower, section: int) -> list[Action]:
        """Let a creditor pull a section from here."""
        held = self._core.held_pages(borrower.handle)
        pages = self._sections(borrower).own(held, section)
        loan = borrower.loans[section]
        return self._loans.fill(loan, pages, step_ticks=self.step_ticks)

    def pass_on(self, loan: Loan, source: Loan) -> list[Action] | None:
        """Let a creditor pull a section from the one that wants it back; None if that is too late.

        :param source: the loan of the latter.
        """
        standing = self._loans.standing().get(source)
        if standing is None:
            return None
        pages = list(chain(*standing.pages))
        return self._loans.fill(loan, pages, standing, step_ticks=self.step_ticks)

    def cut_moved(self, borrower: Borrower, rows: NewPages) -> list[Action]:
        """End loans that creditors fill from pages which a step moves; they are asked for again.

        :param rows: of the plan.  The actions are carried out before the step runs.
        """
        filling = range(borrower.filled, len(borrower.loans))
        own = rows[rows[:, 0] == borrower.handle] if filling else rows[:0]
        moved = [one for one in self._sections(borrower).of_rows(own) if one in filling]
        return self.give_back(self.cut(borrower, min(moved))) if moved else []

    def note_filled(self, borrower: Borrower) -> None:
        """Count the first sections that may be read."""
        standing = self._loans.standing()
        while borrower.filled < len(borrower.loans):
            if borrower.loans[borrower.filled] not in standing:
                break
            borrower.filled += 1

    def replace(self, borrower: Borrower, section: int) -> Loan:
        """Note that another creditor has a section; returns the loan that is over with that."""
        old = borrower.loans[section]
        borrower.loans[section] = borrower.replacing.pop(section)
        borrower.wanted_back.discard(section)
        self.forget(borrower, old)
        return old

    def forget(self, borrower: Borrower, loan: Loan) -> None:
        """Note that a loan has no section any more."""
        del self._borrowers[loan], borrower.creditor_of[loan]

    def cut(self, borrower: Borrower, section: int) -> list[Loan]:
        """Take the loans from a section on off a request; the caller gives them back."""
        others = [at for at in borrower.replacing if at >= section]
        loans = borrower.loans[section:] + [borrower.replacing.pop(at) for at in others]
        del borrower.loans[section:]
        borrower.replaced.difference_update(others)
        borrower.wanted_back = {at for at in borrower.wanted_back if at < section}
        borrower.filled = min(borrower.filled, section)
        for loan in loans:
            self.forget(borrower, loan)
        return loans

    def give_back(self, loans: Sequence[Loan]) -> list[Action]:
        """End loans that are not read any more."""
        return [action for loan in loans for action in self._loans.give_back(loan)]

    def rows(self, borrower: Borrower, sections: Iterable[int]) -> list[tuple[int, int, int, int]]:
        """Tables' rows of sections that are read in place: handle, group, position, page."""
        if borrower.by_queries:
            return []
        return [
            (borrower.handle, *place, page)
            for index in sections
            for place, page in self.beyond(borrower, index).items()
        ]

    def first_lost(self, borrower: Borrower) -> int | None:
        """The first section that may not be there any more; None if all stand, for all we know."""
        standing = self._loans.standing()
        gone = [at for at, one in enumerate(borrower.loans[: borrower.away]) if one not in standing]
        recalled = [] if borrower.recalled is None else [borrower.recalled]
        return min([*gone, *borrower.wanted_back, *recalled], default=None)

    def beyond(self, borrower: Borrower, section: int) -> dict[Place, int]:
        """A creditor's pages of a section, numbered as pages behind the own pool."""
        standing = self._loans.standing()[borrower.loans[section]]
        first = self._agent.neighbours[standing.creditor, standing.incarnation]
        return self._sections(borrower).beyond(standing.pages, first, section)

    def rights(self, borrower: Borrower) -> list[BorrowedPages]:
        """What must stand until a step is over that computes the request."""
        standing = self._loans.standing()
        loans = [*borrower.loans[: borrower.away], *(borrower.ends if borrower.returning else ())]
        found = [standing.get(loan) for loan in loans]
        # A right that is gone already is told as one that cannot stand: the row is missed.
        told = [("", 0, 0) if o is None else (o.creditor, o.incarnation, o.right) for o in found]
        return [BorrowedPages(borrower.handle, *one, borrower.by_queries) for one in told]

    def asked_for(self, borrower: Borrower) -> list[tuple[int, int]]:
        """Handle and tokens of a request whose first tokens are in no page of its tables."""
        is_asked = borrower.by_queries and borrower.away
        return [(borrower.handle, borrower.away * self.section_tokens)] if is_asked else []

    def placed(self, borrower: Borrower) -> list[RequestPlacementEntry]:
        """Where a request's sections are; those on their way count as there already."""
        request = borrower.request
        counts = Counter(borrower.creditor_of[loan] for loan in borrower.loans)
        here = -(-request.num_tokens // self.section_tokens) - borrower.away
        name, own = request.request_id, self.instance
        away = [RequestPlacementEntry(name, *one, local=False) for one in counts.items()]
        return [RequestPlacementEntry(name, own, here, local=True), *away]

    def audit(self, borrower: Borrower) -> list[str]:
        """Every contradiction in the loans of a request, a sentence for each."""
        loans = (*borrower.loans, *borrower.replacing.values())
        name = borrower.request.request_id
        found = [
            f"{name}: {loan} is not its" for loan in loans if self.borrower(loan) is not borrower
        ]
        if set(borrower.creditor_of) != set(loans):
            found.append(f"{name}: it has {set(loans)} and asked for {set(borrower.creditor_of)}")
        return found

    def _sections(self, borrower: Borrower) -> Sections:
        return Sections(borrower.request.model, self._core.layout.groups, self.section_tokens)
