"""Requests that instances have, each at one of them."""

from collections.abc import Iterator, Mapping

from kvell.front.instance_load import InstanceLoad
from kvell.front.request_log import LogEntry
from kvell.vocabulary import RequestId


class InFlight:
    """Owner of the requests that instances have: gives them to instances, and takes them back.

    Nothing else adds a request to an :class:`.InstanceLoad` or removes one.

    :param lines: by instance.
    """

    def __init__(self, lines: Mapping[str, InstanceLoad]) -> None:
        self._lines = lines
        self._entries: dict[RequestId, LogEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[LogEntry]:
        """The oldest first."""
        return iter(self._entries.values())

    def get(self, request_id: RequestId) -> LogEntry | None:
        """Return a request; None if no instance has it."""
        return self._entries.get(request_id)

    def line_of(self, entry: LogEntry) -> InstanceLoad:
        """Return the line to the instance that has a request."""
        return self._lines[entry.line]

    def submit(self, entry: LogEntry, line: InstanceLoad, now: float) -> None:
        """Give a request that waited to an instance."""
        line.add(entry)
        self._entries[entry.request_id] = entry
        if entry.submitted_seconds is None:
            entry.submitted_seconds = now

    def hand_over(self, entry: LogEntry, line: InstanceLoad) -> None:
        """Note that another instance goes on with a request, whose prompt is computed."""
        self.line_of(entry).remove(entry)
        line.add(entry)
        line.emitted(entry, 0)

    def take_back(self, entry: LogEntry) -> None:
        """Take a request from its instance, which has ended it."""
        del self._entries[entry.request_id]
        self.line_of(entry).remove(entry)

    def take_back_all(self, line: InstanceLoad) -> list[LogEntry]:
        """Take everything from an instance that has died, the oldest first; close its line."""
        lost = line.lost()
        for entry in lost:
            del self._entries[entry.request_id]
        return lost

    def going_to(self, instance_id: str) -> list[LogEntry]:
        """Return the requests that are on their way to an instance."""
        return [one for one in self._entries.values() if one.goes_to == instance_id]
