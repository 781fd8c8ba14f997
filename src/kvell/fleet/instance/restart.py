"""How often and how soon a dead instance is started again."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Bounded exponential back-off.

    :param first_seconds: the pause before the first restart.
    :param longest_seconds: no pause is longer.
    :param attempts: restarts in a row without a step of work before giving up.
    """

    first_seconds: float = 0.1
    longest_seconds: float = 10.0
    attempts: int = 6

    def pause_seconds(self, fruitless_restarts: int) -> float | None:
        """How long to wait before the next restart; None gives up."""
        if fruitless_restarts >= self.attempts:
            return None
        return min(self.longest_seconds, self.first_seconds * 2.0**fruitless_restarts)
