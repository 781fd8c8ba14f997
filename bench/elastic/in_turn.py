"""Engines that take turns, a step each, so that the machine's neighbours slow all alike."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kvell.clock import MonotonicClock
from kvell.engine.protocol.messages import Event, Finished, Tokens


class SideClock:
    """A clock that runs only while its own side computes, so that sides may take turns."""

    def __init__(self) -> None:
        self._machine = MonotonicClock()
        self._passed_seconds = 0.0
        self._began_seconds: float | None = None

    def now_seconds(self) -> float:
        """Seconds that this side has computed or waited for requests."""
        if self._began_seconds is None:
            return self._passed_seconds
        return self._passed_seconds + self._machine.now_seconds() - self._began_seconds

    def start(self) -> None:
        """Start the clock: the side computes from now on."""
        self._began_seconds = self._machine.now_seconds()

    def stop(self) -> None:
        """Stop the clock: it is another side's turn."""
        self._passed_seconds, self._began_seconds = self.now_seconds(), None

    def wait_until(self, seconds: float) -> None:
        """Advance to ``seconds``, when the next request comes; no effect if that is past."""
        self._passed_seconds = max(self._passed_seconds, seconds)


def tokens_of(events: Iterable[Event]) -> Iterator[Tokens]:
    """The tokens of a step.

    :raises RuntimeError: if a request ended before it had all it asked for.
    """
    for event in events:
        if isinstance(event, Tokens):
            yield event
        if isinstance(event, Finished) and event.reason != "length":
            raise RuntimeError(f"a request ended with {event.reason}: {event.message}")


class Side(Protocol):
    """An engine that is driven step by step."""

    @property
    def has_work(self) -> bool:
        """Whether any work is left."""
        ...

    def step(self) -> None:
        """Do one step."""
        ...


def alternated(sides: Sequence[Side]) -> None:
    """Run all sides to their ends, a step of each in turn."""
    while any(side.has_work for side in sides):
        for side in sides:
            if side.has_work:
                side.step()
