"""Accessors of the front's parts that tests look at."""

from kvell.engine.protocol.messages import Finished
from kvell.front.request_log import LogEntry


def end_of(request: LogEntry) -> Finished | None:
    """Return the end that a request's reader will receive, or None while there is none."""
    return request.mailbox._finished
