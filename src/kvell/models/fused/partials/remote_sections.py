"""The debtor's side: which sections of a step's requests others compute, and who they are.

Per layer, a request's query rows leave as soon as they are there; its local sections are computed
meanwhile; then the records of the others are folded first, in the order of positions.  The result
has the bits that it has where all pages are local (Infinite-LLM §4, equations 2 and 3).

A creditor that answers too late, or refuses, is not asked any more in that pass.  Requests that
lack records are *missed*, as those whose mapped pages were given to others
(:attr:`kvell.engine.requests.plan.StepResult.missed`): what the pass computed for them counts
nothing, and no other row is changed by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvell.models.fused import _forward


@dataclass(frozen=True)
class SectionRun:
    """Consecutive sections of one request that one creditor holds.

    Runs of a request follow each other from section 0 on; its tables begin where they end.

    :param request: its number in the batch.
    :param creditor: its name.
    :param first_section: positions from ``first_section * SECTION_TOKENS`` on.
    :param rights: numbers of the loans by which they are read, one for each section.
    """

    request: int
    creditor: str
    first_section: int
    rights: tuple[int, ...]


class RemoteSections:
    """Whom a model's passes may ask, and what the next one asks.

    :param creditors: by name, each a ring's end or something that is called
        (:mod:`kvell.models.fused._forward`).  It may change between passes.
    """

    def __init__(self, creditors: Mapping[str, "_forward.Creditor"]) -> None:
        self.meet(creditors)
        self._patience_seconds = 0.0

    def meet(self, creditors: Mapping[str, "_forward.Creditor"]) -> None:
        """Ask these from the next pass on, and no others."""
        from kvell.models.fused import _forward

        self._names = list(creditors)
        self._compiled = _forward.Away(list(creditors.values()))
        self._runs: Sequence[SectionRun] = ()
        self._asked = False

    def expect(self, runs: Sequence[SectionRun], patience_seconds: float) -> None:
        """Say what the next pass asks for; those after it ask for nothing.

        :param patience_seconds: for all answers of the pass together, from its start on.  What is
            spent on a creditor that is then given up, the others get back.
        :raises ValueError: if somebody is named who is not there.
        """
        for run in runs:
            if run.creditor not in self._names:
                raise ValueError(f"runs: {run.creditor} is no creditor of this pass")
        self._runs, self._patience_seconds = runs, patience_seconds

    def compiled(self, groups: Sequence[int]) -> "_forward.Away | None":
        """Return what the pass takes; None where nothing is elsewhere.

        :param groups: with full attention, as the pass counts them.
        """
        self._asked = bool(self._runs)
        if not self._asked:
            return None
        number = {name: index for index, name in enumerate(self._names)}
        runs = [
            (group, run.request, number[run.creditor], run.first_section, run.rights)
            for group in groups
            for run in self._runs
        ]
        self._runs = ()
        self._compiled.expect(runs, self._patience_seconds)
        return self._compiled

    @property
    def lacking(self) -> list[int]:
        """Requests of the last pass, by their numbers, that are missed for want of records."""
        return self._compiled.missed() if self._asked else []
