"""A front's end of a connection to its cluster's manager."""

from collections.abc import Callable

from kvell.fleet.manager.messages import ToFront, ToManager, decode_to_front, encode_message
from kvell.wire.line import MessageLine


class ManagerLine(MessageLine[ToFront]):
    """A connection to the manager; ``hear`` receives every message."""

    def __init__(self, hear: Callable[[ToFront], None]) -> None:
        super().__init__(decode_to_front)
        self.hear = hear

    def send(self, message: ToManager) -> None:
        """Queue a message; it is dropped if the connection has ended."""
        self.send_frame(encode_message(message))
