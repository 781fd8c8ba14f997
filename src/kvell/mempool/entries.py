"""What happens to an instance's part in the pool: the inputs of its agent."""

from typing import NamedTuple

from kvell.mempool.owners import Tick
from kvell.mempool.transfers.messages import PeerMessage, Transfer


class Heard(NamedTuple):
    """A message of another instance came."""

    peer: str
    message: PeerMessage


class PullEnded(NamedTuple):
    """A copy has ended; ``problem`` is "" if it counts."""

    transfer: Transfer
    problem: str


class PeerLost(NamedTuple):
    """An incarnation of another instance is no more; 0: it could not be reached."""

    peer: str
    incarnation: int


NOT_IN_PLACE = -1
BY_QUERIES = -2


class PeerMapped(NamedTuple):
    """An incarnation of another instance is met, whose pool continues one's own from this large
    page on; ``NOT_IN_PLACE``: its pages can only be copied; ``BY_QUERIES``: it computes attention
    over what it lends, for query rows that it is sent."""

    peer: str
    incarnation: int
    first_large: int


class Ticked(NamedTuple):
    """Time has passed; ``now`` is in milliseconds of the instance's clock."""

    now: Tick


class Draining(NamedTuple):
    """The instance is taken out of service: no further text comes in, and no memory is lent."""


PeerEntry = Heard | PullEnded | PeerLost | PeerMapped | Ticked | Draining
