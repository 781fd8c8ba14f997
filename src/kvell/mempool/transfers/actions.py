"""What the transfer machine asks of those who can do I/O, and what it tells its user."""

from dataclasses import dataclass

from kvell.memory import Ints
from kvell.mempool.loans.actions import LoanNews
from kvell.mempool.transfers.messages import PeerMessage, Transfer


@dataclass(frozen=True)
class Send:
    """Send a message to an instance."""

    instance: str
    message: PeerMessage


@dataclass(frozen=True, eq=False)
class Pull:
    """Copy pages of the transfer's sender into own pages; then tell :meth:`.Receiving.pulled`.

    :param rows: int32 [m, 3]: group, page of the sender, own page.
    :param stages: 0, or in how many stages of layers they are being computed: a stage is copied
        when it is said to be written, and all that is left once :class:`PullRest` comes.
    """

    transfer: Transfer
    rows: Ints
    stages: int = 0


@dataclass(frozen=True)
class PullRest:
    """Everything that a :class:`Pull` in stages is to copy is written now: copy what is left."""

    transfer: Transfer


@dataclass(frozen=True)
class StopPull:
    """Stop copying as soon as may be; own pages are given to others once it has ended."""

    transfer: Transfer


@dataclass(frozen=True)
class Grant:
    """From now on the transfer's receiver may read the pages that were offered.

    :param receiver: the instance that may.
    :param pages: (group, page) of each, little-endian int32 pairs.
    :param lends: whether they are a loan: it may ask for attention over them too, and another
        instance may copy them, to be its creditor from then on.
    """

    transfer: Transfer
    receiver: str
    pages: bytes
    lends: bool = False


@dataclass(frozen=True)
class Revoke:
    """From now on it may not; carried out before anybody else gets the pages."""

    transfer: Transfer


@dataclass(frozen=True)
class RoomGranted:
    """The receiver has room for a text that was announced."""

    transfer: Transfer


@dataclass(frozen=True)
class Arrived:
    """A text has come.  Unless it was inserted, its pages are held for the user to claim.

    :param announced: what came along when it was announced, and ``private`` with the text itself.
    """

    transfer: Transfer
    computed: int
    announced: bytes
    private: bytes
    is_inserted: bool = False


@dataclass(frozen=True)
class Ended:
    """The sender's side is over, and its user lets the pages go, which nobody may read any more.

    ``problem`` is "" if the receiver has it all.
    """

    transfer: Transfer
    problem: str


@dataclass(frozen=True)
class Fetched:
    """A text that was asked for is cached here up to ``computed`` tokens, or not: ``problem``."""

    number: int
    computed: int
    problem: str


Action = (
    Send
    | Pull
    | PullRest
    | StopPull
    | Grant
    | Revoke
    | RoomGranted
    | Arrived
    | Ended
    | Fetched
    | LoanNews
)
