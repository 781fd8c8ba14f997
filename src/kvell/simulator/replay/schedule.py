"""The arrivals of a trace's requests: at their times, and never before the answer they follow.

A session's first turn arrives at its own time. A later turn keeps the trace's gap after the arrival
of the turn before, and waits for that turn's end if it takes longer. With arrivals at the start, it
arrives the moment the turn before has ended.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from kvell.simulator.clock.events import EventQueue
from kvell.simulator.traces.rows import TraceRow, predecessors

Arrivals = Literal["start", "trace"]
"""All requests wait at the start, or each arrives at its time."""


class Schedule(EventQueue[int]):
    """Requests by index, in order of arrival; turns that wait for another are not in it.

    :param think_seconds: by request; a later turn arrives this long after the turn before it
        has ended, whatever the trace says.
    :param is_served: returns whether a request can be served.  If not, it is refused: it never
        arrives, and its session's next turn arrives as if it had ended on arrival.
    :param sessions: False makes each row arrive on its own.
    """

    def __init__(
        self,
        rows: Sequence[TraceRow],
        arrivals: Arrivals,
        is_served: Callable[[int], bool],
        *,
        sessions: bool = True,
        think_seconds: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.refused: list[int] = []
        self._rows, self._arrivals, self._is_served = rows, arrivals, is_served
        self._think_seconds = think_seconds
        before = predecessors(rows) if sessions else [None] * len(rows)
        self._next = {last: index for index, last in enumerate(before) if last is not None}
        self._came_seconds: dict[int, float] = {}
        for index, last in enumerate(before):
            if last is None:
                self._come(index, rows[index].arrival_s if arrivals == "trace" else 0.0)

    def came_seconds(self, index: int) -> float:
        """Return when a request arrived.

        :raises KeyError: if its time is not known yet.
        """
        return self._came_seconds[index]

    def refuse(self, index: int, now_seconds: float) -> None:
        self.refused.append(index)
        self.on_ended(index, now_seconds)

    def on_ended(self, index: int, now_seconds: float) -> None:
        """Note that a request has ended: its session's next turn may arrive."""
        after = self._next.get(index)
        if after is None:
            return
        if self._think_seconds is None:
            self._come(after, max(now_seconds, self._wanted_seconds(index, after)))
        else:
            self._come(after, now_seconds + self._think_seconds[after])

    def _wanted_seconds(self, index: int, after: int) -> float:
        came = self._came_seconds[index]
        if self._arrivals == "start":
            return came
        return came + self._rows[after].arrival_s - self._rows[index].arrival_s

    def _come(self, index: int, at_seconds: float) -> None:
        turn: int | None = index
        while turn is not None:
            self._came_seconds[turn] = at_seconds
            if self._is_served(turn):
                self.schedule(at_seconds, turn)
                return
            self.refused.append(turn)
            before, turn = turn, self._next.get(turn)
            at_seconds = at_seconds if turn is None else self._wanted_seconds(before, turn)
