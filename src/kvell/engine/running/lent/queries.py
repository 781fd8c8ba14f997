"""The debtor's side: a step's queries to creditors whose pages it cannot read in place."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvell.engine.requests.plan import BorrowedPages, StepPlan, TokenWork
from kvell.mempool.transports.tcp.partials import ROOM_BYTES, PartialsLine
from kvell.models.partials.remote_sections import RemoteSections, SectionRun

if TYPE_CHECKING:
    from kvell.models.partials import _partials

PATIENCE_SECONDS = 5.0
"""The time limit for all answers of a step together; the next step queries the others again."""

FindsPartials = Callable[[str, int], PartialsLine | None]
"""A function that returns the query line to an incarnation of an instance; None: it is closed."""


class Queries:
    """The queries of an engine's passes to creditors.

    :param num_models: the number of models, a draft model included.
    :ivar remote: the remote sections of each model's passes.
    :ivar lacking: handles of the step's work that some creditor did not answer.
    """

    def __init__(self, finds: FindsPartials, num_models: int = 1) -> None:
        self.remote = [RemoteSections({}, number) for number in range(num_models)]
        self._finds = finds
        self._lines: dict[tuple[str, int], PartialsLine | None] = {}
        self._queried: list[BorrowedPages] = []
        self.lacking: set[int] = set()

    def begin(self, plan: StepPlan) -> None:
        self.lacking.clear()
        self._queried = [pages for pages in plan.borrowed if pages.by_queries]
        if not self._queried:
            return
        keys = dict.fromkeys((pages.instance, pages.incarnation) for pages in self._queried)
        lines = {key: self._finds(*key) for key in keys}
        if not lines.items() <= self._lines.items():
            self._lines = lines
            for remote in self.remote:
                remote.meet({_name(*key): _creditor(line) for key, line in lines.items()})

    def expect(self, model: int, work: Sequence[TokenWork]) -> None:
        numbers = {item.handle: index for index, item in enumerate(work)}
        queried = [pages for pages in self._queried if pages.handle in numbers]
        if queried:
            self.remote[model].expect(_runs(queried, numbers), PATIENCE_SECONDS)

    def note(self, model: int, work: Sequence[TokenWork]) -> None:
        if self._queried:
            self.lacking |= {work[index].handle for index in self.remote[model].lacking}


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


def _creditor(line: PartialsLine | None) -> "_partials.Creditor":
    """Return the creditor that a pass calls; a closed one refuses all queries."""
    from kvell.models.partials import _partials

    if line is None:
        return _partials.CalledCreditor(0, lambda _query: False, lambda _seconds: None)
    return _partials.CalledCreditor(ROOM_BYTES, line.post, line.take)


def _name(instance: str, incarnation: int) -> str:
    return f"{instance} {incarnation}"
