"""The decision when a heartbeat is due, and whether one may be sent without the loop."""

import math


class HeartbeatSchedule:
    """The state of the instance's loop, and the time of the next heartbeat.

    ::

        resting ──works──► working ──works──► working (the next turn) ──rests──► resting

    A resting loop waits for its peer, and wakes when a beat is due.  A working loop beats between
    its steps; during a step another thread beats in its place, up to a limit: a turn that takes
    too long means that the loop hangs, and such an instance must fall silent.  The other thread
    repeats the last heartbeat, so the loop sends a fresh one at its next turn.

    All times are seconds of one clock that never runs backwards.
    """

    def __init__(self, beat_seconds: float, longest_turn_seconds: float) -> None:
        """:param beat_seconds: time from one beat to the next.
        :param longest_turn_seconds: after this time in one turn, the other thread stops beating.
        """
        self.beat_seconds = beat_seconds
        self._longest_turn_seconds = longest_turn_seconds
        self._next_beat_seconds = -math.inf
        self._working_since_seconds: float | None = None
        self._owes_news = False

    def works(self, now_seconds: float) -> None:
        self._working_since_seconds = now_seconds

    def rests(self) -> None:
        self._working_since_seconds = None

    def beats(self, now_seconds: float, *, alone: bool = False) -> None:
        """Note that a beat is sent; ``alone``: by the other thread."""
        self._next_beat_seconds = now_seconds + self.beat_seconds
        self._owes_news = alone

    def is_due(self, now_seconds: float) -> bool:
        """Return whether the loop should beat: first, when due, or after the other thread did."""
        return self._owes_news or now_seconds >= self._next_beat_seconds

    def may_beat_alone(self, now_seconds: float) -> bool:
        """Return whether a beat is due, and the other thread may send it for the busy loop."""
        since_seconds = self._working_since_seconds  # read once: the loop's thread may change it
        if since_seconds is None or now_seconds < self._next_beat_seconds:
            return False
        return now_seconds - since_seconds <= self._longest_turn_seconds

    def seconds_to_beat(self, now_seconds: float) -> float:
        """Return the time until a beat is due; 0 if it is."""
        return max(0.0, self._next_beat_seconds - now_seconds)
