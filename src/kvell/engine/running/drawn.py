"""Pending tokens of a plan: the step before draws them, and they are filled in when it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvell.engine.requests.plan import PENDING, StepPlan, StepResult, TokenWork


@dataclass(frozen=True)
class Pending:
    """Rows of pending tokens among all tokens of some work, and the handles they belong to."""

    rows: tuple[int, ...]
    handles: tuple[int, ...]


NOTHING = Pending((), ())


def pending(work: Sequence[TokenWork]) -> Pending:
    """Find the work whose last token the step before draws; no other token can be pending."""
    if all(one.token_ids.item(-1) != PENDING for one in work):
        return NOTHING
    ends = accumulate(one.count for one in work)
    waiting = [
        (end - 1, one.handle)
        for end, one in zip(ends, work, strict=True)
        if one.token_ids.item(-1) == PENDING
    ]
    return Pending(tuple(row for row, _ in waiting), tuple(handle for _, handle in waiting))


class DrawnBefore:
    """The tokens drawn by one step, for the next; steps run in order."""

    def __init__(self) -> None:
        self._last: tuple[StepPlan, StepResult] | None = None
        self._has_failed = False

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Note the result of a step that has run."""
        self._last, self._has_failed = (plan, result), False

    def fail(self) -> None:
        """Note that a step has failed; what the next one makes of its tokens is nobody's."""
        self._has_failed = True

    def newest(self, handles: Sequence[int]) -> list[int]:
        """The last token drawn for each handle in the step before.

        Where there is none any token will do: the request has ended, or its step has failed.

        :raises KeyError: if none was drawn for one of them.
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
