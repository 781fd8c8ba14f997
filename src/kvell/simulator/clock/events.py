"""A queue of events, ordered by time and then by order of scheduling."""

import heapq
import math
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EventQueue(Generic[Item]):
    """A priority queue; events at the same time are taken in order of scheduling."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._sequence = 0
        self._latest_seconds = -math.inf

    def __len__(self) -> int:
        return len(self._heap)

    def schedule(self, at_seconds: float, item: Item) -> None:
        heapq.heappush(self._heap, (at_seconds, self._sequence, item))
        self._sequence += 1
        self._latest_seconds = max(self._latest_seconds, at_seconds)

    def next_seconds(self) -> float | None:
        """Return the time of the next event; None if nothing is scheduled."""
        return self._heap[0][0] if self._heap else None

    def num_due(self, now_seconds: float) -> int:
        """Return how many events are due by now; linear in the queue unless all are."""
        if now_seconds >= self._latest_seconds:
            return len(self._heap)
        return sum(1 for at_seconds, _, _ in self._heap if at_seconds <= now_seconds)

    def pop(self) -> Item:
        """Take the next event.

        :raises IndexError: if there is none.
        """
        return heapq.heappop(self._heap)[2]
