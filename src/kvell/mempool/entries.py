"""The events of an instance's part in the pool: the inputs of its agent."""

from typing import NamedTuple

from kvell.mempool.owners import Tick
from kvell.mempool.transfers.messages import PeerMessage, Transfer


class Heard(NamedTuple):
    """A message of another instance arrived."""

    peer: str
    message: PeerMessage


class PullEnded(NamedTuple):
    """A copy has ended; ``problem`` is "" if it is valid."""

    transfer: Transfer
    problem: str


class PeerLost(NamedTuple):
    """An incarnation of another instance is dead; 0: the instance could not be reached."""

    peer: str
    incarnation: int


NOT_IN_PLACE = -1
BY_QUERIES = -2


class PeerMapped(NamedTuple):
    """An incarnation of another instance is connected.

    :param first_large: the large page at which its mapped pool begins after this instance's;
        ``NOT_IN_PLACE``: its pages can only be copied; ``BY_QUERIES``: it computes attention over
        lent pages, for query rows.
    """

    peer: str
    incarnation: int
    first_large: int


class Ticked(NamedTuple):
    """Time has passed; ``now`` is in milliseconds of the instance's clock."""

    now: Tick


class Draining(NamedTuple):
    """The instance is draining: it accepts no more texts and lends no more memory."""


PeerEntry = Heard | PullEnded | PeerLost | PeerMapped | Ticked | Draining
