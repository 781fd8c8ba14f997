"""The pauses before a dead instance is restarted."""

from dataclasses import dataclass

MOST_DOUBLINGS = 64


@dataclass(frozen=True)
class RestartPolicy:
    """Bounded exponential back-off, without an end.

    :param first_seconds: the pause before the first restart.
    :param longest_seconds: the longest pause.
    :param attempts: restarts in a row without a step, after which requests wait no longer.
    """

    first_seconds: float = 0.1
    longest_seconds: float = 10.0
    attempts: int = 6

    def pause_seconds(self, fruitless_restarts: int) -> float:
        """Return the pause before the next restart."""
        doublings = min(fruitless_restarts, MOST_DOUBLINGS)
        return min(self.longest_seconds, self.first_seconds * 2.0**doublings)
