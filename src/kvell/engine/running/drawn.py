"""Pending tokens of a plan: the previous step draws them, and they are filled in at its run."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvell.engine.requests.plan import PENDING, StepPlan, StepResult, TokenWork
from kvell.vocabulary import StepNumber


@dataclass(frozen=True)
class Pending:
    """The rows of pending tokens among all tokens of some work, and their handles."""

    rows: tuple[int, ...]
    handles: tuple[int, ...]


NOTHING = Pending((), ())


def pending(work: Sequence[TokenWork]) -> Pending:
    """Find the work whose last token the previous step draws; no other token can be pending."""
    if all(item.token_ids.item(-1) != PENDING for item in work):
        return NOTHING
    ends = accumulate(item.count for item in work)
    waiting = [
        (end - 1, item.handle)
        for end, item in zip(ends, work, strict=True)
        if item.token_ids.item(-1) == PENDING
    ]
    return Pending(tuple(row for row, _ in waiting), tuple(handle for _, handle in waiting))


class DrawnBefore:
    """The tokens that one step has drawn, for the next step.

    Steps run in order, but the result of one may be taken after that of the next.
    """

    def __init__(self) -> None:
        self._last: tuple[StepPlan, StepResult] | None = None
        self._has_failed = False
        self._step = StepNumber(0)

    def note(self, plan: StepPlan, result: StepResult) -> None:
        if self._is_newest(plan.step):
            self._last = (plan, result)
            self._has_failed = False

    def fail(self, step: StepNumber) -> None:
        """Note that a step has failed; the next step's results from its tokens are discarded."""
        if self._is_newest(step):
            self._has_failed = True

    def _is_newest(self, step: StepNumber) -> bool:
        self._step = max(self._step, step)
        return step == self._step

    def newest(self, handles: Sequence[int]) -> list[int]:
        """Return the last token that the previous step drew for each handle.

        Without a valid token any will do: the request has ended, or its step has failed.

        :raises KeyError: if none was drawn for a handle.
        """
        if self._has_failed:
            return [0] * len(handles)
        drawn = self._drawn() if handles else {}
        return [max(0, drawn[handle]) for handle in handles]

    def _drawn(self) -> dict[int, int]:
        if self._last is None:
            return {}
        plan, result = self._last
        drawing = (work.handle for work in plan.work if work.samples)
        yields = result.by_work()
        return {handle: tokens[-1] for handle, tokens in zip(drawing, yields, strict=True)}
