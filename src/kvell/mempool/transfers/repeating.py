"""Messages that are said again until they are answered.

A message, or its answer, can get lost where a connection breaks and neither instance dies.  The
other side would wait until its deadline then, with pages that nobody needs.
"""

from dataclasses import dataclass

from kvell.mempool.owners import Tick
from kvell.mempool.transfers.messages import PeerMessage

FIRST_TICKS: Tick = 2_000
"""How long an answer is awaited at first; each time twice as long."""
LONGEST_TICKS: Tick = 16_000
"""How long it is awaited at most: a request may wait for the answer, and its pages with it."""


@dataclass
class Repeated:
    """A message without an answer so far.

    :ivar at: when it is said again.
    """

    message: PeerMessage
    at: Tick
    _pause: Tick = FIRST_TICKS

    @classmethod
    def said(cls, message: PeerMessage, now: Tick) -> "Repeated":
        """A message that is said now for the first time."""
        return cls(message, now + FIRST_TICKS)

    def is_due(self, now: Tick) -> bool:
        """Whether it is said again now; if so, the next time is later."""
        if now < self.at:
            return False
        self._pause = min(2 * self._pause, LONGEST_TICKS)
        self.at = now + self._pause
        return True
