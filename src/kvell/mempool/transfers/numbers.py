"""The numbers of rights to read, for outgoing transfers and for lent memory."""

SLOTS = 4096
"""The number of words in a table of rights. The word of a right is at its number's remainder."""


class RightNumbers:
    """The right numbers of one incarnation of an instance, each used once.

    A right is not granted if another right uses its word, so numbers skip words in use: a loan may
    stay valid during thousands of transfers.
    """

    def __init__(self) -> None:
        self._last = 0
        self._words: dict[int, int] = {}

    def __contains__(self, number: int) -> bool:
        return self._words.get(number % SLOTS) == number

    def take(self) -> int:
        """Return the next number, 1 or more; its word is in use only if all words are."""
        after = self._last + 1
        free = (n for n in range(after, after + SLOTS) if n % SLOTS not in self._words)
        self._last = next(free, after)
        self._words.setdefault(self._last % SLOTS, self._last)
        return self._last

    def free(self, number: int) -> None:
        if number in self:
            del self._words[number % SLOTS]
