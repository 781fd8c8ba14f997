"""The time that a copied section adds to an instance's steps, measured while it decodes.

::

    plain decode steps ──► their usual time ─┐
    decode steps with copies ──► their time ─┴─► the difference, over the sections copied in them

A copy that is hidden by the computation adds nothing (Infinite-LLM's figure 12: 16 tokens a step).
The planner of loans reads the figure in heartbeats.  Pure.
"""

FORGETTING = 1 / 16
"""Weight of the latest plain step in the usual time."""
LEAST_STEPS, LEAST_SECTIONS = 8, 4
"""Plain steps and copied sections without which nothing is reported."""
MOST_SECTIONS = 64
"""Beyond this number, earlier sections count half."""


class CopyCost:
    """The measurement of one instance, as debtor and as creditor."""

    def __init__(self) -> None:
        self._usual_seconds = self._added_seconds = self._sections = 0.0
        self._plain_steps = self._copied = 0
        self._was_copying = False

    @property
    def section_seconds(self) -> float | None:
        """The seconds that the copy of a section adds to steps; None: not measured yet."""
        if self._plain_steps < LEAST_STEPS or self._sections < LEAST_SECTIONS:
            return None
        return max(0.0, self._added_seconds / self._sections)

    def on_step(self, seconds: float, *, is_decode: bool, copied: int, is_copying: bool) -> None:
        """Process a step that has ended.

        :param seconds: of its passes.
        :param is_decode: whether it computed no prompt.
        :param copied: sections that were copied to or from the instance so far.
        :param is_copying: whether more are being copied now.
        """
        sections = copied - self._copied
        is_plain = not (sections or is_copying or self._was_copying)
        self._copied, self._was_copying = copied, is_copying
        if not is_decode:
            return
        if is_plain:
            self._plain_steps += 1
            weight = max(FORGETTING, 1 / self._plain_steps)
            self._usual_seconds += weight * (seconds - self._usual_seconds)
        elif self._plain_steps >= LEAST_STEPS:
            self._added_seconds += seconds - self._usual_seconds
            self._sections += sections
            if self._sections > MOST_SECTIONS:
                self._added_seconds /= 2
                self._sections /= 2
