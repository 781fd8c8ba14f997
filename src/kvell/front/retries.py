"""Whether a request is retried after its instance ended, or its step failed: pure decisions.

::

    first death ──killed, cut──► again
        └───────crash, step────► again, on probation
    on probation: the only suspect until its next token; if the instance crashes or the step fails,
    it is refused, and others of that step are not blamed
"""

from dataclasses import dataclass

from kvell.fleet.instance.death import BLAMELESS, Cause

MOST_RETRIES = 2
MOST_FAILED_STEPS = 16
"""Most failed steps in the life of a request, each of which its next token cleared it of."""


@dataclass
class Attempts:
    """The failures that a request went through.

    :ivar deaths: number of instances that ended while they had it.
    :ivar alone: of these, those that ended by their own fault while they had no other request.
    :ivar failed_steps: steps that were to compute it, while no other request was under suspicion.
    :ivar on_probation: whether it is under suspicion, so that it runs with no other suspect.
    """

    deaths: int = 0
    alone: int = 0
    failed_steps: int = 0
    on_probation: bool = False

    def after(self, cause: Cause, *, sole: bool) -> str | None:
        """Count a death; return why there is no further attempt, or None if there is one.

        An instance that was taken out of service is not counted.

        :param sole: whether the instance had no other request.
        """
        if cause == "drained":
            return None
        if cause == "step":
            return self._after_step()
        self.deaths += 1
        self.alone += sole and cause not in BLAMELESS
        if self.deaths > MOST_RETRIES:
            return f"its instance ended {self.deaths} times, and a request is retried twice"
        if self.alone > 1 or (self.on_probation and cause == "crash"):
            return "two instances ended while they computed it, so it is not retried"
        self.on_probation = cause == "crash" or self.deaths == MOST_RETRIES
        return None

    def _after_step(self) -> str | None:
        """Count a failed step; return why there is no further attempt, or None if there is one.

        A token since the last failed step clears a request of that step, so few share the blame.
        """
        self.failed_steps += 1
        if self.on_probation:
            return "it was the only suspect, so it is not retried"
        if self.failed_steps > MOST_FAILED_STEPS:
            return f"{MOST_FAILED_STEPS} such steps failed before, so it is not retried"
        self.on_probation = True
        return None
