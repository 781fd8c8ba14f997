"""Numbers of rights to read: of transfers that go out, and of memory that is lent."""

SLOTS = 4096
"""Words in a table of rights; a number's word is its remainder."""


class RightNumbers:
    """Numbers of one incarnation of an instance, each used once.

    A right whose word another one has is not granted, so words in use are passed over: a loan may
    stand for as long as thousands of transfers take.
    """

    def __init__(self) -> None:
        self._last = 0
        self._words: dict[int, int] = {}

    def __contains__(self, number: int) -> bool:
        return self._words.get(number % SLOTS) == number

    def take(self) -> int:
        """Return the next number, 1 or more; its word is in use only if all of them are."""
        after = self._last + 1
        free = (one for one in range(after, after + SLOTS) if one % SLOTS not in self._words)
        self._last = next(free, after)
        self._words.setdefault(self._last % SLOTS, self._last)
        return self._last

    def free(self, number: int) -> None:
        """Give its word back: the right was revoked, or never granted; idempotent."""
        if number in self:
            del self._words[number % SLOTS]
