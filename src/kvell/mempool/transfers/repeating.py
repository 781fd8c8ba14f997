"""Messages that are resent until they are answered.

A message, or its answer, can be lost when a connection breaks and neither instance dies.  Without
resending, the other side would hold unused pages until its deadline.
"""

from dataclasses import dataclass

from kvell.mempool.owners import Tick
from kvell.mempool.transfers.messages import PeerMessage

FIRST_TICKS: Tick = 2_000
"""The first time to wait for an answer; it doubles with each repetition."""
LONGEST_TICKS: Tick = 16_000
"""The longest time to wait for an answer: a request and its pages may wait for it."""


@dataclass
class ResentMessage:
    """A message without an answer so far.

    :ivar at: the time to resend it.
    """

    message: PeerMessage
    at: Tick
    _pause: Tick = FIRST_TICKS

    @classmethod
    def first(cls, message: PeerMessage, now: Tick) -> "ResentMessage":
        """Return a message that is sent now for the first time."""
        return cls(message, now + FIRST_TICKS)

    def is_due(self, now: Tick) -> bool:
        """Return whether to resend the message now; if so, schedule the next repetition."""
        if now < self.at:
            return False
        self._pause = min(2 * self._pause, LONGEST_TICKS)
        self.at = now + self._pause
        return True
