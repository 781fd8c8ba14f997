"""Failed steps: which of them an instance survives, and how they are logged."""

import logging

import torch

from kvell.clock import Clock
from kvell.engine.failing.failures import StepFailed, StepFailure
from kvell.engine.requests.plan import StepPlan

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 16
"""Largest number of consecutive steps that may fail.  After more, the process counts as broken."""
LOG_SECONDS = 5.0
"""Interval in which one failure is logged with its traceback; the others are counted."""

_BROKEN: tuple[type[BaseException], ...] = (
    MemoryError,
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", MemoryError),
)


class FailedSteps:
    """The failures of one engine's steps.

    :ivar last: the exception of the latest failed step.
    :ivar in_a_row: the number of failed steps since the last that did not fail.
    """

    def __init__(self, clock: Clock) -> None:
        self.last: Exception | None = None
        self._clock = clock
        self.in_a_row = self._untold = 0
        self._told_seconds: float | None = None

    def on_success(self) -> None:
        self.in_a_row = 0

    def contain(self, plan: StepPlan, failed: StepFailed) -> StepFailure:
        """Return the stand-in for the result of a failed step.

        :raises Exception: the step's exception, if the instance must end: the process seems
            broken, or another instance reads what the step should have computed.
        """
        cause = failed.__cause__
        if not isinstance(cause, Exception):
            raise failed
        self.in_a_row += 1
        self.last = cause
        if _is_broken(cause) or len(plan.streams) or self.in_a_row > MOST_IN_A_ROW:
            raise cause
        self._log(plan, cause)
        return StepFailure(plan.step, f"a step failed ({type(cause).__name__})")

    def _log(self, plan: StepPlan, cause: Exception) -> None:
        now = self._clock.now_seconds()
        if self._told_seconds is not None and now - self._told_seconds < LOG_SECONDS:
            self._untold += 1
            return
        names = ", ".join(work.request_id for work in plan.work[:8])
        more = f" and {len(plan.work) - 8} more" if len(plan.work) > 8 else ""
        before = f"; {self._untold} others failed since the last message" if self._untold else ""
        logger.error(
            "step %d failed, and with it %s%s%s", plan.step, names, more, before, exc_info=cause
        )
        self._told_seconds = now
        self._untold = 0


def _is_broken(cause: Exception) -> bool:
    return isinstance(cause, _BROKEN) or "CUDA error" in str(cause)
