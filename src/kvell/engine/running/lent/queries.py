"""The debtor's end: what a step asks of the creditors whose pages it cannot read in place."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvell.engine.requests.plan import BorrowedPages, StepPlan
from kvell.mempool.transports.tcp.partials import ROOM_BYTES, PartialsLine
from kvell.models.fused.partials.remote_sections import RemoteSections, SectionRun

if TYPE_CHECKING:
    from kvell.models.fused import _forward

PATIENCE_SECONDS = 5.0
"""For all answers of a step together; whoever takes longer is asked again in the next one."""

FindsPartials = Callable[[str, int], PartialsLine | None]
"""Where an incarnation of an instance is asked; None: it is gone."""


class Queries:
    """Tells a model's passes what to ask, and of whom.

    :param finds: where creditors are asked.
    :ivar remote: of the passes.
    """

    def __init__(self, finds: FindsPartials) -> None:
        self.remote = RemoteSections({})
        self._finds = finds
        self._lines: dict[tuple[str, int], PartialsLine | None] = {}

    def expect(self, plan: StepPlan) -> None:
        """Say what the next pass asks for, which computes the plan's work."""
        asked = [one for one in plan.borrowed if one.by_queries]
        if not asked:
            return
        keys = dict.fromkeys((one.instance, one.incarnation) for one in asked)
        lines = {key: self._finds(*key) for key in keys}
        if not lines.items() <= self._lines.items():
            self._lines = lines
            self.remote.meet({_name(*key): _creditor(line) for key, line in lines.items()})
        numbers = {work.handle: index for index, work in enumerate(plan.work)}
        self.remote.expect(_runs(asked, numbers), PATIENCE_SECONDS)

    def lacking(self, plan: StepPlan) -> list[int]:
        """Return the handles whose rows of the pass count nothing, for want of answers."""
        return [plan.work[index].handle for index in self.remote.lacking]


def _runs(asked: Sequence[BorrowedPages], numbers: dict[int, int]) -> list[SectionRun]:
    """Consecutive sections of one request at one creditor as one.

    :param asked: of each request all sections from the first one on, in order.
    :param numbers: of requests in the batch, by handle.
    """
    runs: list[SectionRun] = []
    sections = dict.fromkeys(numbers, 0)
    for one in asked:
        request, name = numbers[one.handle], _name(one.instance, one.incarnation)
        section = sections[one.handle]
        sections[one.handle] = section + 1
        last = runs[-1] if section and runs else None
        if last is not None and (last.request, last.creditor) == (request, name):
            runs[-1] = SectionRun(request, name, last.first_section, (*last.rights, one.right))
        else:
            runs.append(SectionRun(request, name, section, (one.right,)))
    return runs


def _creditor(line: PartialsLine | None) -> "_forward.Creditor":
    """What a pass calls; it refuses everything in place of a creditor that is gone."""
    from kvell.models.fused import _forward

    if line is None:
        return _forward.CalledCreditor(0, lambda _query: False, lambda _seconds: None)
    return _forward.CalledCreditor(ROOM_BYTES, line.post, line.take)


def _name(instance: str, incarnation: int) -> str:
    return f"{instance} {incarnation}"
