"""Slow start of an instance that joins others, so that waiting requests do not flood it."""

FIRST_REQUESTS = 4
"""Requests that a new instance may have in flight before it has shown a first token."""


class Ramp:
    """A bound on the requests in flight of an instance that joins others which already serve.

    A new instance has the least load and the most free memory of all, so every policy that looks
    at load would send it all waiting requests before it is known to compute at all.  The bound
    grows by one with every first token of a request, and ends when it has reached the credits.

    :param credits: requests that the instance takes after its slow start.
    :ivar limit: most requests in flight; None once there is no bound any more.
    """

    def __init__(self, credits: int) -> None:  # noqa: A002 - the protocol's word
        self._credits = credits
        self.limit: int | None = FIRST_REQUESTS if credits > FIRST_REQUESTS else None

    def first_token(self) -> None:
        if self.limit is not None:
            grown = self.limit + 1
            self.limit = grown if grown < self._credits else None

    def allows(self, in_flight: int) -> bool:
        return self.limit is None or in_flight < self.limit
