"""Who waits, who is served, and with how many credits: the front without any I/O.

::

    add ──► waiting ──credit──► in flight ──Finished──► gone
               │ ▲                  ├─ drop ──► Cancel sent, still in flight
               │ └── attempts left ─┴─ instance dies ──► error, gone
               └─ drop ──► gone
"""

from dataclasses import replace

from kvell.engine.protocol.messages import Cancel, Finished, Submit, Tokens
from kvell.errors import ChangeSomething, TryLater
from kvell.server.front.request_log import LogEntry, RequestObserver
from kvell.server.instance.death import InstanceDeath
from kvell.vocabulary import FinishReason, RequestId


class AdmissionQueue:
    """The request log and the bounded waiting line.

    :param max_waiting: requests that may wait for a credit.
    """

    def __init__(self, max_waiting: int, observer: RequestObserver | None = None) -> None:
        self._max_waiting = max_waiting
        self._observer = observer
        self._credits = 0
        self._waiting: dict[RequestId, LogEntry] = {}
        self._in_flight: dict[RequestId, LogEntry] = {}

    @property
    def waiting(self) -> int:
        """Requests the instance has not seen yet."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Requests the instance has and did not finish."""
        return len(self._in_flight)

    def open(self, credits: int) -> None:  # noqa: A002 - the protocol's word
        """An instance is ready for so many requests at once."""
        self._credits = credits

    def add(self, entry: LogEntry) -> None:
        """Put a request in the line.

        :raises TryLater: when the line is full.
        :raises ChangeSomething: when the id is already in use.
        """
        if entry.request_id in self._waiting or entry.request_id in self._in_flight:
            raise ChangeSomething("request_id", entry.request_id, "is in use", "choose another")
        if self._is_full():
            if self._observer is not None:
                self._observer.rejected()
            raise TryLater(f"{len(self._waiting)} requests are waiting; come back in a moment")
        self._waiting[entry.request_id] = entry

    def due(self, now: float) -> list[Submit]:
        """Submissions that credits allow now, first come first served.

        One request on probation is in flight at a time, so that a crash has one suspect.
        """
        chosen: list[LogEntry] = []
        free = self._free_credits()
        if free and self._waiting:
            suspect = any(entry.attempts.on_probation for entry in self._in_flight.values())
            for entry in self._waiting.values():
                if len(chosen) == free:
                    break
                if suspect and entry.attempts.on_probation:
                    continue
                suspect |= entry.attempts.on_probation
                chosen.append(entry)
        for entry in chosen:
            del self._waiting[entry.request_id]
            self._in_flight[entry.request_id] = entry
            if entry.submitted_seconds is None:
                entry.submitted_seconds = now
        return [entry.submission() for entry in chosen]

    def drop(self, request_id: RequestId, end_as: FinishReason, now: float) -> Cancel | None:
        """End a request early; returns what the instance must be told."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._end(waiting, Finished(request_id, waiting.attempt, end_as), now)
        entry = self._in_flight.get(request_id)
        if entry is None or entry.end_as != "cancelled":
            return None
        entry.end_as, entry.is_dropped = end_as, True
        return Cancel(request_id)

    def tokens(self, event: Tokens, now: float) -> None:
        """Hand new tokens to their reader; unknown requests and old attempts are dropped."""
        entry = self._in_flight.get(event.request_id)
        fresh = entry.take_tokens(event) if entry else ()
        if entry is None or not fresh:
            return
        self._observe_tokens(entry, len(fresh), now)
        entry.last_token_seconds = now
        entry.mailbox.put(fresh)

    def finished(self, event: Finished, now: float) -> None:
        """A request is over; its credit is free again."""
        entry = self._in_flight.get(event.request_id)
        if entry is None or event.attempt != entry.attempt:
            return
        del self._in_flight[event.request_id]
        reason = entry.end_as if event.reason == "cancelled" else event.reason
        self._end(entry, replace(event, reason=reason), now)

    def lost(self, death: InstanceDeath, now: float) -> None:
        """Take back what a dead instance had: to the head of the line, or to an end.

        The next attempt goes on behind the tokens that were emitted.
        """
        self._credits = 0
        lost, self._in_flight = self._in_flight, {}
        again: dict[RequestId, LogEntry] = {}
        for entry in lost.values():
            end = _end_after(entry, death, sole=len(lost) == 1)
            if end is None:
                entry.attempt += 1
                again[entry.request_id] = entry
            else:
                self._end(entry, end, now)
        self._waiting = again | self._waiting

    def fail_waiting(self, message: str, now: float) -> None:
        """No instance will come: every request in the line ends with an error."""
        failed, self._waiting = self._waiting, {}
        for entry in failed.values():
            self._end(entry, entry.failure(message), now)

    def _is_full(self) -> bool:
        """Whether a new request finds no place; those that wait for another attempt take none."""
        most = self._max_waiting + self._free_credits()
        if len(self._waiting) < most:
            return False
        return sum(1 for entry in self._waiting.values() if not entry.attempt) >= most

    def _free_credits(self) -> int:
        return max(0, self._credits - len(self._in_flight))

    def _observe_tokens(self, entry: LogEntry, count: int, now: float) -> None:
        if self._observer is None:
            return
        if entry.last_token_seconds is None:
            seconds = now - entry.arrived_seconds
            self._observer.first_tokens(seconds, count, entry.prompt_tokens)
        else:
            self._observer.next_tokens(now - entry.last_token_seconds, count)

    def _end(self, entry: LogEntry, finished: Finished, now: float) -> None:
        entry.mailbox.finish(finished)
        if self._observer is not None:
            self._observer.ended(entry.ended(finished, now))


def _end_after(entry: LogEntry, death: InstanceDeath, *, sole: bool) -> Finished | None:
    """The end of a request whose instance died; None if it is tried again."""
    if entry.is_dropped:
        return entry.failure("", entry.end_as)
    if death.cause == "closing":
        return entry.failure(death.problem)
    refusal = entry.attempts.after(death.cause, sole=sole)
    return entry.failure(f"{death.problem}; {refusal}") if refusal else None
