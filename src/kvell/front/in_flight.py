"""Requests that instances have; each request is at one instance."""

from collections.abc import Iterator, Mapping

from kvell.front.instance_load import InstanceLoad
from kvell.front.request_log import LogEntry
from kvell.vocabulary import RequestId


class InFlight:
    """The owner of the requests that instances have: gives them to instances, and takes them back.

    Nothing else adds a request to an :class:`.InstanceLoad` or removes one.
    """

    def __init__(self, lines: Mapping[str, InstanceLoad]) -> None:
        self._lines = lines
        self._entries: dict[RequestId, LogEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self._entries.values())

    def get(self, request_id: RequestId) -> LogEntry | None:
        """Return a request; None if no instance has it."""
        return self._entries.get(request_id)

    def line_of(self, entry: LogEntry) -> InstanceLoad:
        return self._lines[entry.line]

    def submit(self, entry: LogEntry, line: InstanceLoad, now: float) -> None:
        line.pace.crowd.pass_to(now)
        line.add(entry)
        self._entries[entry.request_id] = entry
        if entry.submitted_seconds is None:
            entry.submitted_seconds = now

    def hand_over(self, entry: LogEntry, line: InstanceLoad, now: float) -> None:
        line.pace.crowd.pass_to(now)
        self._remove(entry, now)
        line.add(entry)
        line.on_tokens(entry, 0)

    def take_back(self, entry: LogEntry, now: float) -> None:
        del self._entries[entry.request_id]
        self._remove(entry, now)

    def take_back_all(self, line: InstanceLoad) -> list[LogEntry]:
        lost = line.lost()
        for entry in lost:
            del self._entries[entry.request_id]
        return lost

    def going_to(self, instance_id: str) -> list[LogEntry]:
        return [entry for entry in self._entries.values() if entry.goes_to == instance_id]

    def _remove(self, entry: LogEntry, now: float) -> None:
        line = self.line_of(entry)
        line.pace.crowd.pass_to(now)
        line.remove(entry)
