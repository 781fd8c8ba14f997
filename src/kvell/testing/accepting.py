"""The answer of an engine to a request that it takes."""

from collections.abc import Sequence

from kvell.engine.protocol.messages import Acknowledgement, Event


def is_accepted(events: Sequence[Event]) -> bool:
    return [type(event) for event in events] == [Acknowledgement]
