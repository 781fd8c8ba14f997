"""Counters of an engine that are more than one number; deterministic, as the core is."""

from bisect import bisect_left

STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the sizes of steps, those of vLLM's ``iteration_tokens_total``."""


class StepSizes:
    """How many steps computed how many tokens.

    :ivar tokens: of all steps together.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._counts = [0] * (len(STEP_TOKENS_BUCKETS) + 1)

    def add(self, tokens: int) -> None:
        """A step computes so many tokens."""
        self.tokens += tokens
        self._counts[bisect_left(STEP_TOKENS_BUCKETS, tokens)] += 1

    def by_size(self) -> tuple[int, ...]:
        """Steps of each bucket, not cumulative; the last are those above all bounds."""
        return tuple(self._counts)


class DraftTokens:
    """Steps of requests with guesses, and how many of these were right, by position."""

    def __init__(self) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self._accepted: list[int] = []

    def add(self, proposed: int, accepted: int) -> None:
        """A request's step verified ``proposed`` guesses, the first ``accepted`` were right."""
        if not proposed:
            return
        self.drafts += 1
        self.draft_tokens += proposed
        self._accepted += [0] * (proposed - len(self._accepted))
        for position in range(accepted):
            self._accepted[position] += 1

    @property
    def accepted_tokens(self) -> int:
        """Guesses that were right."""
        return sum(self._accepted)

    def accepted_by_position(self) -> tuple[int, ...]:
        """Right guesses at each place behind the newest token."""
        return tuple(self._accepted)
