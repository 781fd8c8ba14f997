"""What a cached page is worth beside memory: the part of prompts' tokens that were lately hit."""

HALVE_REQUESTS = 64
"""Requests after which those before count half."""


class HitShare:
    """Of the tokens that requests began with, how many were cached.  Counts only; no clock."""

    def __init__(self) -> None:
        self._hit_tokens = self._tokens = self._requests = 0

    def note(self, hit_tokens: int, tokens: int) -> None:
        """A request begins."""
        self._requests += 1
        if self._requests % HALVE_REQUESTS == 0:
            self._hit_tokens //= 2
            self._tokens //= 2
        self._hit_tokens += hit_tokens
        self._tokens += tokens

    def is_old(self, age: int, beside: int) -> bool:
        """Is an age at least that part of another?  Where nothing is hit, any is."""
        return age * self._tokens >= beside * self._hit_tokens
