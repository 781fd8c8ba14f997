"""The loop of a virtual cluster: all events, in order of time."""

from collections import deque
from collections.abc import Callable

from kvell.simulator.clock.events import EventQueue
from kvell.simulator.clock.transport import VirtualTransport

Happening = Callable[[], None]
"""An event, called at its time."""


class Loop:
    """Virtual time and its events.

    :ivar last: events that follow all others of the present time.
    """

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self._events: EventQueue[Happening] = EventQueue()
        self.last: deque[Happening] = deque()

    def at(self, seconds: float, happening: Happening) -> None:
        self._events.schedule(max(seconds, self.now_seconds), happening)

    def after(self, seconds: float, happening: Happening) -> None:
        self.at(self.now_seconds + seconds, happening)

    def next_seconds(self, transport: VirtualTransport) -> float | None:
        if self.last:
            return self.now_seconds
        times = (self._events.next_seconds(), transport.next_seconds())
        return min((seconds for seconds in times if seconds is not None), default=None)

    def advance(self, now_seconds: float) -> bool:
        """Move to a time, and run the next event that is due then; return whether there was one."""
        self.now_seconds = max(self.now_seconds, now_seconds)
        due_seconds = self._events.next_seconds()
        if due_seconds is None or due_seconds > self.now_seconds:
            return False
        self._events.pop()()
        return True
