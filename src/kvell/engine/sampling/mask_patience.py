"""The time that steps may wait for masks of grammars."""

PATIENCE_SHARE = 0.1
MOST_PATIENCE_SECONDS = 0.005


class MaskPatience:
    """The time that steps may wait for masks: a share of all time, up to some milliseconds."""

    def __init__(self, now_seconds: float) -> None:
        self._saved = 0.0
        self._then = now_seconds

    def left_seconds(self, now_seconds: float) -> float:
        grown = self._saved + PATIENCE_SHARE * (now_seconds - self._then)
        self._saved = min(grown, MOST_PATIENCE_SECONDS)
        self._then = now_seconds
        return self._saved

    def spend(self, seconds: float) -> None:
        """Count seconds that were waited."""
        self._saved = max(0.0, self._saved - seconds)
