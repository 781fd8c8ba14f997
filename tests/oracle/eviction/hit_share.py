"""The hit share: the fraction of recent prompt tokens that were cached."""

HALVE_REQUESTS = 64
"""The number of requests after which earlier counts are halved."""


class HitShare:
    """The cached fraction of the tokens that recent requests began with."""

    def __init__(self) -> None:
        self._hit_tokens = self._tokens = self._requests = 0

    def note(self, hit_tokens: int, tokens: int) -> None:
        """Count a request that begins."""
        self._requests += 1
        if self._requests % HALVE_REQUESTS == 0:
            self._hit_tokens //= 2
            self._tokens //= 2
        self._hit_tokens += hit_tokens
        self._tokens += tokens

    def is_old(self, age: int, beside: int) -> bool:
        """Return whether ``age`` is at least the hit share of ``beside``; always without hits."""
        return age * self._tokens >= beside * self._hit_tokens
