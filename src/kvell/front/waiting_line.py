"""Requests that no instance has: a queue in turns, and apart from it those that wait for loans."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvell.engine.requests.equal_parts import leaves_parts
from kvell.engine.requests.turns import TurnQueue
from kvell.front.instance_load import InstanceLoad
from kvell.front.request_log import LogEntry, RequestObserver
from kvell.front.routes import RequestTransfer, Routes, TransferTotals
from kvell.vocabulary import RequestId

IDLE_WAIT_SECONDS = 10.0
"""Longer waits are reported if no instance has a request, since no end can make room then."""

NO_TRANSFERS: Mapping[RequestTransfer, TransferTotals] = MappingProxyType({})

logger = logging.getLogger(__name__)


class IdleWait(NamedTuple):
    """Requests that wait while no instance has any.

    :param seconds: duration of this state.
    :param why: why the next request cannot be submitted.
    """

    requests: int
    seconds: float
    why: str


class Entries(NamedTuple):
    """Requests that have not ended.

    :param in_flight: requests that instances have, and ``waiting``; each oldest first.
    :param transfers: the moved requests and the pulls of ended requests so far.
    """

    in_flight: list[LogEntry]
    waiting: list[LogEntry]
    idle_wait: IdleWait | None = None
    transfers: Mapping[RequestTransfer, TransferTotals] = NO_TRANSFERS


class WaitingLine:
    """The queue of a front; requests that instances have are charged here for their tokens.

    A request that is longer than one instance's memory waits apart from the queue until others can
    lend what it needs, in turn with others of its kind.  So it delays no other request.

    :param routes: choose the instance of a request.
    :param observer: is notified of requests that wait though all instances are idle.
    :ivar idle_wait: a wait of ``IDLE_WAIT_SECONDS`` or more, as of the last look; else None.
    """

    def __init__(self, routes: Routes, observer: RequestObserver | None = None) -> None:
        self._routes, self._observer = routes, observer
        self.idle_wait: IdleWait | None = None
        self._idle_since: float | None = None
        self._turns: TurnQueue[LogEntry] = TurnQueue()
        self._long: TurnQueue[LogEntry] = TurnQueue()
        self._may_lend = False

    def __len__(self) -> int:
        return len(self._turns) + len(self._long)

    def __iter__(self) -> Iterator[LogEntry]:
        yield from self._turns
        yield from self._long

    def get(self, request_id: RequestId) -> LogEntry | None:
        """Return the waiting request of an id; None if there is none."""
        return self._turns.get(request_id) or self._long.get(request_id)

    @property
    def awaits_memory(self) -> bool:
        return bool(self._long)

    def note_memory(self) -> None:
        self._may_lend = True

    def look(self, lines: Collection[InstanceLoad], now: float) -> None:
        """Detect requests that wait for long though no instance has any; called for heartbeats.

        Requests of other fronts count, since they may hold the memory.
        """
        had, self.idle_wait = self.idle_wait, None
        if not self or any(line.in_flight or line.running_requests for line in lines):
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        seconds = now - self._idle_since
        if seconds < IDLE_WAIT_SECONDS:
            return
        self.idle_wait = IdleWait(len(self), seconds, self._why(lines))
        if had is None:
            message = "%d requests are waiting although every instance is idle: %s"
            logger.warning(message, len(self), self.idle_wait.why)
            if self._observer is not None:
                self._observer.waits_idle()

    def _why(self, lines: Collection[InstanceLoad]) -> str:
        entry = next(iter(self))
        if not any(line.is_open for line in lines):
            return "no instance accepts any"
        if self._routes.placements.is_long(entry):
            problem = "is longer than one instance's memory, and no other lends what it needs"
            return f"one with a prompt of {entry.prompt_tokens} tokens {problem}"
        return f"no instance has room for one with a prompt of {entry.prompt_tokens} tokens"

    def has_place(self, tenant: str, most: int) -> bool:
        """Return whether a new request of a tenant may wait; retried requests take no place.

        :param most: requests of one tenant that may wait; other tenants find a part kept for
            them (:func:`.leaves_parts`).
        """
        waiting = self._turns.count_new()
        for name, count in self._long.count_new().items():
            waiting[name] = waiting.get(name, 0) + count
        return leaves_parts(waiting, tenant, 1, most)

    def add(self, entry: LogEntry) -> None:
        self._turns.add(entry)

    def put_back(self, entries: Sequence[LogEntry], *, behind_returned: bool = False) -> None:
        for line in (self._turns, self._long):
            returned = [entry for entry in entries if line.knows(entry)]
            line.put_back(returned, behind_returned=behind_returned)

    def going(
        self, open_lines: list[InstanceLoad], now: float
    ) -> Iterator[tuple[LogEntry, InstanceLoad]]:
        """Yield the requests that can be submitted now, in turn; submit each before the next.

        :param open_lines: lines that have room.
        """
        yield from self._due_long(open_lines, now)
        aside: list[LogEntry] = []
        for entry, lines in _in_turn(self._turns, open_lines):
            if self._routes.placements.is_long(entry):  # its tenant is charged among its kind
                self._may_lend |= not self._long
                self._turns.discard(entry)
                self._long.add(entry)
                yield from self._due_long(open_lines, now)
                continue
            line = self._routes.line_for(entry, lines, now)
            if line is not None:
                self._take(self._turns, entry)
                yield entry, line
                _close_full(open_lines, line)
            elif entry.attempts.on_probation:  # it waits until another suspect is cleared
                self._turns.take(entry)
                aside.append(entry)
            else:
                break
        self._turns.put_back(aside)

    def _due_long(
        self, open_lines: list[InstanceLoad], now: float
    ) -> Iterator[tuple[LogEntry, InstanceLoad]]:
        if not self._may_lend:
            return
        for entry, lines in _in_turn(self._long, open_lines):
            line = self._routes.line_for(entry, lines, now)
            if line is None:
                self._may_lend = False  # until something changes
                return
            self._take(self._long, entry)
            yield entry, line
            _close_full(open_lines, line)

    @staticmethod
    def _take(line: TurnQueue[LogEntry], entry: LogEntry) -> None:
        line.take(entry)
        line.charge(entry.request_id, entry.prompt_cost_tokens)

    def charge(self, entry: LogEntry, tokens: int) -> None:
        """Charge the party of a request for its tokens."""
        if not self._turns.charge(entry.request_id, tokens):
            self._long.charge(entry.request_id, tokens)

    def discard(self, entry: LogEntry) -> bool:
        """Forget a request, waiting or at an instance; return whether it waited."""
        waited = [line.discard(entry) for line in (self._turns, self._long)]
        return any(waited)

    def clear(self) -> Iterable[LogEntry]:
        return [*self._turns.clear(), *self._long.clear()]


def _in_turn(
    queue: TurnQueue[LogEntry], open_lines: list[InstanceLoad]
) -> Iterator[tuple[LogEntry, list[InstanceLoad]]]:
    """Yield the requests of a queue in turn, with the open lines that have room for the tenant.

    The caller takes each request out of the queue, or stops.
    """
    had_their_part: set[str] = set()
    while open_lines and (entry := queue.first(but=had_their_part)) is not None:
        lines = [line for line in open_lines if line.has_room_for(entry.spec.tenant)]
        if lines:
            yield entry, lines
        else:
            had_their_part.add(entry.spec.tenant)


def _close_full(open_lines: list[InstanceLoad], line: InstanceLoad) -> None:
    if not line.has_room:
        open_lines.remove(line)
