"""The debtor's side: a step's queries to creditors whose pages it cannot read in place."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvell.engine.requests.plan import BorrowedPages, StepPlan
from kvell.mempool.transports.tcp.partials import ROOM_BYTES, PartialsLine
from kvell.models.fused.partials.remote_sections import RemoteSections, SectionRun

if TYPE_CHECKING:
    from kvell.models.fused import _forward

PATIENCE_SECONDS = 5.0
"""The time limit for all answers of a step together; the next step queries the others again."""

FindsPartials = Callable[[str, int], PartialsLine | None]
"""A function that returns the query line to an incarnation of an instance; None: it is closed."""


class Queries:
    """The queries of a model's passes to creditors.

    :param finds: finds the line to a creditor.
    :ivar remote: the remote sections of the passes.
    """

    def __init__(self, finds: FindsPartials) -> None:
        self.remote = RemoteSections({})
        self._finds = finds
        self._lines: dict[tuple[str, int], PartialsLine | None] = {}

    def expect(self, plan: StepPlan) -> None:
        """Set the queries of the next pass, which computes the plan's work."""
        queried = [pages for pages in plan.borrowed if pages.by_queries]
        if not queried:
            return
        keys = dict.fromkeys((pages.instance, pages.incarnation) for pages in queried)
        lines = {key: self._finds(*key) for key in keys}
        if not lines.items() <= self._lines.items():
            self._lines = lines
            self.remote.meet({_name(*key): _creditor(line) for key, line in lines.items()})
        numbers = {work.handle: index for index, work in enumerate(plan.work)}
        self.remote.expect(_runs(queried, numbers), PATIENCE_SECONDS)

    def lacking(self, plan: StepPlan) -> list[int]:
        """Return the handles whose rows of the pass are invalid because answers are missing."""
        return [plan.work[index].handle for index in self.remote.lacking]


def _runs(queried: Sequence[BorrowedPages], numbers: dict[int, int]) -> list[SectionRun]:
    """Join consecutive sections of a request at the same creditor.

    :param queried: all sections of each request from the first one on, in order.
    :param numbers: index of each request in the batch, by handle.
    """
    runs: list[SectionRun] = []
    sections = dict.fromkeys(numbers, 0)
    for pages in queried:
        request = numbers[pages.handle]
        name = _name(pages.instance, pages.incarnation)
        section = sections[pages.handle]
        sections[pages.handle] = section + 1
        last = runs[-1] if section and runs else None
        if last is not None and (last.request, last.creditor) == (request, name):
            runs[-1] = SectionRun(request, name, last.first_section, (*last.rights, pages.right))
        else:
            runs.append(SectionRun(request, name, section, (pages.right,)))
    return runs


def _creditor(line: PartialsLine | None) -> "_forward.Creditor":
    """Return the creditor that a pass calls; a closed one refuses all queries."""
    from kvell.models.fused import _forward

    if line is None:
        return _forward.CalledCreditor(0, lambda _query: False, lambda _seconds: None)
    return _forward.CalledCreditor(ROOM_BYTES, line.post, line.take)


def _name(instance: str, incarnation: int) -> str:
    return f"{instance} {incarnation}"
