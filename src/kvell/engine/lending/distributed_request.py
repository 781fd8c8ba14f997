"""One request over several instances: its remote sections, and those on their way."""

from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvell.engine.requests.plan import NewPages, PageCopy
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, GroupSpec
from kvell.mempool.loans.messages import Loan
from kvell.pages.rows import NewPageRow
from kvell.vocabulary import SECTION_TOKENS, PageId, StepNumber

Place = tuple[int, int]
"""Group and position of a page."""


class Sections:
    """The pages of a model's sections, in the order of a loan's pages.

    :param groups: all groups of the layout; those of the model with full attention count.
    :param section_tokens: a multiple of their pages' tokens.
    """

    def __init__(self, model: str, groups: Sequence[GroupSpec], section_tokens: int) -> None:
        self._groups = list(full_groups(model, groups))
        self._num_groups = len(groups)
        self._section_tokens = section_tokens

    def page_counts(self) -> list[int]:
        """Return the number of pages of a section, for each group of the layout."""
        counts = [0] * self._num_groups
        for index, group in self._groups:
            counts[index] = self._section_tokens // group.page_tokens
        return counts

    def own(self, held: NewPages, section: int) -> list[PageId]:
        """Return the local pages of a section.

        :param held: a request's rows [m, :class:`.NewPageRow`].
        """
        page_of = {(group, position): page for _, group, position, page in held.tolist()}
        return [page_of[place] for place in self._places(section)]

    def beyond(
        self, pages: Sequence[Sequence[int]], first_large: int, section: int
    ) -> dict[Place, PageId]:
        """Return a creditor's pages of a section by place, numbered as pages after the own pool.

        :param pages: pages of the creditor, for each group of the layout.
        :param first_large: the large page at which the creditor's pool begins in these numbers.
        """
        per_large = {index: group.pages_per_large for index, group in self._groups}
        return {
            place: PageId(first_large * per_large[place[0]] + page)
            for place, page in zip(self._places(section), chain(*pages), strict=True)
        }

    def of_rows(self, rows: NewPages) -> set[int]:
        """Return the sections of rows [m, :class:`.NewPageRow`] of one request."""
        tokens = {index: group.page_tokens for index, group in self._groups}
        return {
            position * tokens[group] // self._section_tokens
            for _, group, position, _ in rows.tolist()
            if group in tokens
        }

    def _places(self, section: int) -> Iterator[Place]:
        for index, group in self._groups:
            count = self._section_tokens // group.page_tokens
            for position in range(section * count, (section + 1) * count):
                yield index, position


def full_groups(model: str, groups: Sequence[GroupSpec]) -> Iterator[tuple[int, GroupSpec]]:
    """Yield the groups of a model whose sections may be remote, with their indices."""
    for index, group in enumerate(groups):
        if group.model == model and group.kind is GroupKind.FULL:
            yield index, group


def local_reason(model: str, groups: Sequence[GroupSpec]) -> str:
    """Return why all pages of a model's requests stay here; "" if sections may be remote."""
    seen = [group for group in groups if group.model == model]
    full = [group for _, group in full_groups(model, groups)]
    if not full:
        return "its model has no full attention"
    if any(group.kind is GroupKind.DROPPING for group in seen):
        return "its model drops tokens"
    if any(group.counts_images for group in seen):
        return "its pages hold images among the text"
    if any(SECTION_TOKENS % group.page_tokens for group in full):
        return f"its pages do not divide {SECTION_TOKENS} tokens"
    return ""


def resumes(model: str, groups: Sequence[GroupSpec]) -> bool:
    """Return whether a request can continue after remote sections, without pages here.

    Pages that hold embeddings may be needed for the rest of an image that begins before it.
    """
    seen = [group for group in groups if group.model == model]
    return all(group.kind is GroupKind.FULL and not group.holds_embeddings for group in seen)


def repeats(model: str, groups: Sequence[GroupSpec]) -> bool:
    return all(group.kind is not GroupKind.STATE for group in groups if group.model == model)


def section_bytes(groups: Sequence[GroupSpec], tokens: int = SECTION_TOKENS) -> int:
    """Return the bytes of a section in the groups whose pages may be remote.

    With several models, it is the largest of all, so that no plan takes more than there is.
    """
    models = {group.model for group in groups}
    sizes = (sum(group.token_bytes for _, group in full_groups(m, groups)) for m in models)
    return tokens * max(sizes, default=0)


NO_STEP = StepNumber(0)
MOST_LATE_STEPS = 3


@dataclass
class RemoteSection:
    """One section at a creditor, or on its way there.

    :ivar is_recalled: whether it must move to another creditor.
    :ivar successor: the section at the creditor to which it moves; None if there is none yet.
    :ivar is_copied: whether a successor has been filled.
    """

    creditor: str
    loan: Loan
    is_recalled: bool = False
    successor: "RemoteSection | None" = None
    is_copied: bool = False


def loans_of(sections: Sequence[RemoteSection]) -> list[Loan]:
    """Return the loans of sections, and then those of their successors."""
    successors = [section.successor for section in sections]
    return [section.loan for section in (*sections, *filter(None, successors))]


@dataclass
class DistributedRequest:
    """The owner of one request's remote sections.

    :ivar sections: the first sections, in order; the first ``filled`` may be read.
    :ivar by_queries: whether creditors compute attention over remote sections; else steps read
        them in place.
    :ivar late: number of consecutive steps that creditors did not answer in time;
        ``late_at``: the number of computed tokens then.
    :ivar away: number of sections that the tables mark as remote; without pages, of those that
        still are.
    :ivar recalled: the first section that must be copied back; None if there is none.
    :ivar returning: the creditors' pages that are still to be copied back, by their places.
    :ivar ends: loans to give back with the result of step ``ends_with``, which may read them.
    """

    request: Request
    handle: int
    creditors: deque[str] = field(default_factory=deque)
    sections: list[RemoteSection] = field(default_factory=list)
    by_queries: bool = False
    late: int = 0
    late_at: int = -1
    filled: int = 0
    away: int = 0
    recalled: int | None = None
    returning: dict[Place, PageId] = field(default_factory=dict)
    ends: list[Loan] = field(default_factory=list)
    ends_with: StepNumber = NO_STEP

    @property
    def has_pages(self) -> bool:
        """Whether the request still has the pages of ``handle``; a preempted one has not."""
        return self.request.handle == self.handle

    @property
    def is_asking(self) -> bool:
        """Whether a creditor has not answered yet, or is pulling a section."""
        return len(self.sections) > self.filled

    @property
    def moving(self) -> list[int]:
        """The recalled sections that must move to other creditors."""
        return [index for index, section in enumerate(self.sections) if section.is_recalled]

    def replace_moved(self) -> tuple[list[int], list[Loan]]:
        """Switch recalled sections to filled successors; return them and the loans that end."""
        moved: list[int] = []
        over: list[Loan] = []
        for index, section in enumerate(self.sections):
            if section.successor is not None and section.successor.is_copied:
                self.sections[index] = section.successor
                moved.append(index)
                over.append(section.loan)
        return moved, over

    def note_filled(self, readable: Container[Loan]) -> None:
        """Update the number of first sections that may be read."""
        while self.filled < len(self.sections) and self.sections[self.filled].loan in readable:
            self.filled += 1

    def first_lost(self, readable: Container[Loan]) -> int | None:
        """Return the first section that is lost or recalled; None if none is, as far as known."""
        away = enumerate(self.sections[: self.away])
        gone = [index for index, section in away if section.loan not in readable]
        recalled = [] if self.recalled is None else [self.recalled]
        return min([*gone, *self.moving, *recalled], default=None)

    def index_of(self, loan: Loan) -> int | None:
        """Return the number of the section that a loan holds; None if it holds a successor."""
        loans = (index for index, section in enumerate(self.sections) if section.loan == loan)
        return next(loans, None)

    def cut(self, first: int) -> list[Loan]:
        """Remove the sections from ``first`` on; return their loans, and those of successors."""
        cut, self.sections = self.sections[first:], self.sections[:first]
        self.filled = min(self.filled, first)
        return loans_of(cut)

    def next_is_computed(self, section_tokens: int) -> bool:
        """Return whether the next section can leave: it is complete, and not the last one."""
        end = (len(self.sections) + 1) * section_tokens
        return self.recalled is None and end <= self.request.settled

    def end_with(self, step: StepNumber, loans: Sequence[Loan]) -> None:
        self.ends += loans
        self.ends_with = step

    def take_ends(self, done: StepNumber) -> list[Loan]:
        """Return the loans that no step reads any more."""
        if self.returning or done < self.ends_with:
            return []
        ends, self.ends = self.ends, []
        return ends

    def asks_again(self) -> bool:
        """Count a late answer of creditors; return whether the next step asks them again.

        After ``MOST_LATE_STEPS`` in a row, what they lend is recomputed instead.
        """
        if self.request.settled != self.late_at:
            self.late = 0
            self.late_at = self.request.settled
        self.late += 1
        return self.by_queries and self.late <= MOST_LATE_STEPS

    def starts_again(self, sections: int) -> None:
        """Keep only the first ``sections`` sections, after the request has lost its pages."""
        self.away = self.filled = sections
        self.recalled = None
        self.creditors.clear()
        self.returning.clear()
        self.ends = []

    def copies_home(self, rows: NewPages) -> list[PageCopy]:
        """Return the copies of returning pages to the local pages that a plan allocates.

        They are made last.  If the plan moves a page again, the later row counts.

        :param rows: [m, :class:`.NewPageRow`] of a plan.
        """
        local = rows[rows[:, NewPageRow.HANDLE] == self.handle]
        given = {(group, position): page for _, group, position, page in local.tolist()}
        places = [place for place in self.returning if place in given]
        return [PageCopy(place[0], self.returning.pop(place), given[place]) for place in places]
