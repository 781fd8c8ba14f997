"""When a heartbeat is due, and for how long one may be sent without the loop: a pure decision."""

import math


class HeartbeatSchedule:
    """Notes what the instance's loop does, and when it was last said that it lives.

    ::

        resting ──works──► working ──works──► working (the next turn) ──rests──► resting

    A resting loop waits for its peer, and wakes by itself when a beat is due.  A working loop
    beats between its steps; during a step somebody else beats in its place, but not for ever: a
    turn that takes too long is a loop that hangs, and nobody may say of it that it lives.  Who
    beats in its place knows only what was last said: the loop says what is new at its next turn.

    All times are seconds of one clock that never runs backwards.
    """

    def __init__(self, beat_seconds: float, longest_turn_seconds: float) -> None:
        """:param beat_seconds: time from one beat to the next.
        :param longest_turn_seconds: a loop that works on one turn for longer is not vouched for.
        """
        self.beat_seconds = beat_seconds
        self._longest_turn_seconds = longest_turn_seconds
        self._next_beat_seconds = -math.inf
        self._working_since_seconds: float | None = None
        self._owes_news = False

    def works(self, now_seconds: float) -> None:
        """Note that the loop begins a turn."""
        self._working_since_seconds = now_seconds

    def rests(self) -> None:
        """Note that the loop waits for its peer."""
        self._working_since_seconds = None

    def beats(self, now_seconds: float, *, alone: bool = False) -> None:
        """Note that a beat is sent; ``alone``: in the place of the loop."""
        self._next_beat_seconds = now_seconds + self.beat_seconds
        self._owes_news = alone

    def is_due(self, now_seconds: float) -> bool:
        """Whether the loop should beat: it is time, or somebody else has; so it is at first."""
        return self._owes_news or now_seconds >= self._next_beat_seconds

    def may_beat_alone(self, now_seconds: float) -> bool:
        """Whether a beat is due and may be sent in the place of a loop that is busy."""
        since_seconds = self._working_since_seconds  # read once: the loop's thread may change it
        if since_seconds is None or now_seconds < self._next_beat_seconds:
            return False
        return now_seconds - since_seconds <= self._longest_turn_seconds

    def seconds_to_beat(self, now_seconds: float) -> float:
        """Time until a beat is due; 0 if it is."""
        return max(0.0, self._next_beat_seconds - now_seconds)
