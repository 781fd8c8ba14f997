"""The open exchanges of one side of a protocol: state, deadline, and resending until answered.

A transfer, a request for a text and a loan are exchanges: each has a key that is never used again,
a peer, a deadline, and perhaps a message that the peer has to answer.  A message, or its answer,
can be lost when a connection breaks and neither instance dies.  Without resending, the other side
would hold unused pages until its deadline.
"""

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from msgspec import structs

from kvell.mempool.loans.messages import Borrow, Loan, LoanOver, Recall
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action, Send
from kvell.mempool.transfers.messages import PeerMessage

FIRST_TICKS: Tick = 2_000
"""The first time to wait for an answer; it doubles with each repetition."""
LONGEST_TICKS: Tick = 16_000
"""The longest time to wait for an answer: a request and its pages may wait for it."""


@dataclass
class ResentMessage:
    """A message without an answer so far."""

    message: PeerMessage
    at: Tick
    _pause: Tick = FIRST_TICKS

    @classmethod
    def first(cls, message: PeerMessage, now: Tick) -> "ResentMessage":
        return cls(message, now + FIRST_TICKS)

    def is_due(self, now: Tick) -> bool:
        """Return whether to resend the message now; if so, schedule the next repetition."""
        if now < self.at:
            return False
        self._pause = min(2 * self._pause, LONGEST_TICKS)
        self.at = now + self._pause
        return True


@dataclass
class Exchange:
    """One exchange.

    :ivar deadline: when it ends by itself; None: never.
    :ivar unanswered: the message that the peer must answer; None: none is awaited.
    :ivar incarnation: the peer's; 0: unknown, or the death of any incarnation ends the exchange.
    """

    peer: str
    deadline: Tick | None
    unanswered: ResentMessage | None = field(default=None, kw_only=True)
    incarnation: int = field(default=0, kw_only=True)


Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry", bound=Exchange)


class ExchangeSide(Generic[Key, Entry]):
    """One side of a protocol.

    :ivar open: the exchanges that have not ended, by key, in their order of begin.
    """

    def __init__(self) -> None:
        self.open: dict[Key, Entry] = {}
        self._now: Tick = 0

    def __len__(self) -> int:
        return len(self.open)

    def __contains__(self, key: Key) -> bool:
        return key in self.open

    @property
    def next_deadline(self) -> Tick | None:
        """The next time at which an exchange ends or a message is resent; None if there is none."""
        entries = self.open.values()
        ticks = [entry.deadline for entry in entries if entry.deadline is not None]
        repeats = [entry.unanswered.at for entry in entries if entry.unanswered is not None]
        return min(ticks + repeats, default=None)

    def of(self, peer: str, key: Key) -> Entry | None:
        entry = self.open.get(key)
        return entry if entry is not None and entry.peer == peer else None

    def tick(self, now: Tick) -> list[Action]:
        """End late exchanges and resend unanswered messages."""
        self._now = now
        actions = [action for key in self.late(now) for action in self._over(key, "it timed out")]
        return actions + self.resend(now)

    @abstractmethod
    def _over(self, key: Key, why: str) -> list[Action]:
        """End an exchange here, and report that."""

    def late(self, now: Tick) -> list[Key]:
        return [
            key
            for key, entry in self.open.items()
            if entry.deadline is not None and entry.deadline <= now
        ]

    def resend(self, now: Tick) -> list[Send]:
        """Send the messages again that have waited long enough, with the time that remains."""
        sends = []
        for entry in self.open.values():
            if entry.unanswered is not None and entry.unanswered.is_due(now):
                message = entry.unanswered.message
                if entry.deadline is not None and isinstance(message, Borrow | Recall):
                    message = structs.replace(message, ticks_left=entry.deadline - now)
                sends.append(Send(entry.peer, message))
        return sends

    def of_instance(self, instance: str, incarnation: int = 0) -> list[Key]:
        """Return the exchanges with an incarnation of an instance and earlier ones; 0: with all."""
        return [
            key
            for key, entry in self.open.items()
            if entry.peer == instance and not 0 < incarnation < entry.incarnation
        ]


def send(entry: Exchange, message: PeerMessage, now: Tick) -> Send:
    entry.unanswered = ResentMessage.first(message, now)
    return Send(entry.peer, message)


def over(peer: str, loan: Loan, why: str) -> Send:
    return Send(peer, LoanOver(loan, why))
