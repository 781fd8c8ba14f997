"""The one loop of a virtual cluster: what is to happen, in order of its time."""

from collections.abc import Callable

from kvell.simulator.clock.events import EventQueue
from kvell.simulator.clock.transport import VirtualTransport

Happening = Callable[[], None]
"""Something that happens at a moment."""


class Loop:
    """Virtual time, and what is to happen in it.

    :ivar now_seconds: the time of what happens now.
    """

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self._events: EventQueue[Happening] = EventQueue()

    def at(self, seconds: float, happening: Happening) -> None:
        """Let something happen at a time, or now if that is past."""
        self._events.schedule(max(seconds, self.now_seconds), happening)

    def after(self, seconds: float, happening: Happening) -> None:
        """Let something happen so many seconds from now."""
        self.at(self.now_seconds + seconds, happening)

    def next_seconds(self, transport: VirtualTransport) -> float | None:
        """When anything happens next, deliveries included; None: nothing will."""
        times = (self._events.next_seconds(), transport.next_seconds())
        return min((one for one in times if one is not None), default=None)

    def advance(self, now_seconds: float) -> bool:
        """Move to a time, and let the next thing happen that is due then; whether any was."""
        self.now_seconds = max(self.now_seconds, now_seconds)
        due_seconds = self._events.next_seconds()
        if due_seconds is None or due_seconds > self.now_seconds:
            return False
        self._events.pop()()
        return True
