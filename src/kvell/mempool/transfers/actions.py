"""Actions of the agent for its I/O, and notices to its user."""

from dataclasses import dataclass

from kvell.memory import Ints
from kvell.mempool.loans.actions import LoanNews
from kvell.mempool.transfers.messages import PeerMessage, Transfer


@dataclass(frozen=True)
class Send:
    """An action that sends a message to an instance."""

    instance: str
    message: PeerMessage


@dataclass(frozen=True, eq=False)
class Pull:
    """An action that copies pages of a transfer's sender; :meth:`.Receiving.on_pulled` follows.

    :param rows: int32 [m, 3]: group, page of the sender, local page.
    :param stages: 0, or the number of stages of layers in which the pages are being computed: a
        stage is copied when it is reported as written, and the rest after :class:`PullRest`.
    """

    transfer: Transfer
    rows: Ints
    stages: int = 0


@dataclass(frozen=True)
class PullRest:
    """An action that copies the rest of a :class:`Pull` in stages, now completely written."""

    transfer: Transfer


@dataclass(frozen=True)
class StopPull:
    """An action that stops a pull soon; its local pages are reused only after its end."""

    transfer: Transfer


@dataclass(frozen=True)
class Grant:
    """An action that lets a transfer's receiver read the offered pages from now on.

    :param pages: (group, page) of each, little-endian int32 pairs.
    :param lends: whether the pages are a loan: the receiver may also query attention over them, and
        another instance may copy them to become the next creditor.
    """

    transfer: Transfer
    receiver: str
    pages: bytes
    lends: bool = False


@dataclass(frozen=True)
class Revoke:
    """An action that ends the receiver's right to read, before the pages are reused."""

    transfer: Transfer


@dataclass(frozen=True)
class RoomGranted:
    """A notice that the receiver has room for an announced text."""

    transfer: Transfer


@dataclass(frozen=True)
class Arrived:
    """A notice that a text has arrived.  Unless it is inserted, its pages are held for the user.

    :param announced: the private bytes of its announcement; ``private`` arrived with the text.
    :param pages: the number of copied pages of each group, up to the last with any.
    """

    transfer: Transfer
    computed: int
    announced: bytes
    private: bytes
    is_inserted: bool = False
    pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended:
    """A notice that the sender's side has ended. The user releases the pages, now unreadable.

    ``problem`` is "" if the receiver has the whole text.
    """

    transfer: Transfer
    problem: str
    pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fetched:
    """A notice that a requested text is cached here up to ``computed`` tokens, or its problem."""

    number: int
    computed: int
    problem: str
    pages: tuple[int, ...] = ()


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
