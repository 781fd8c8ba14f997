"""Messages between instances about one transfer.

::

    sender                                   receiver
      │ ── Prepare(text, computed) ─────────► │  holds its cached part, and pages for the rest
      │ ◄── Prepared(missing pages) ───────── │
      │ ── Offer(the sender's pages) ───────► │  pulls them
      │ ◄── Pulled ────────────────────────── │  the sender may reuse its pages

A text that is being computed is offered twice: with its ``stages`` when the pass begins, and again
when it is computed.  In between the sender reports the progress of the pass with ``Written``, which
is a hint: after the second offer the receiver pulls all remaining bytes.

Either side may end a transfer with ``Abandon`` at any moment.  Messages may be lost, late or
duplicated: unanswered messages are resent, messages for unknown transfers are answered with
``Abandon``, and deadlines end transfers that are never answered.
"""

from msgspec import Struct

from kvell.mempool.loans.messages import LoanMessage

MOST_TICKS = 1_200_000
"""The longest time, 20 minutes, for which an instance holds pages at another's request."""


class Transfer(Struct, frozen=True, order=True):
    """The name of a transfer: the sender, its incarnation, and a number never used again."""

    sender: str
    incarnation: int
    number: int


class Prepare(Struct, frozen=True, tag=True):
    """A sender's request to make room for the first ``computed`` tokens of a text.

    :param tokens: the text, little-endian int32.
    :param ticks_left: the time after which the sender gives up.
    :param inserts: whether the receiver caches the text, or passes it to its waiting user.
    :param images: first token, tokens and image tokens of each image of the text in order;
        little-endian int32.
    :param contents: the contents that some ids of the text name; ``attached`` is data sent with
        the text.  The I/O layer removes both.
    """

    transfer: Transfer
    fingerprint: str
    tokens: bytes
    computed: int
    root: str
    model: str
    ticks_left: int
    inserts: bool
    private: bytes = b""
    images: bytes = b""
    contents: bytes = b""
    attached: bytes = b""


class Prepared(Struct, frozen=True, tag=True):
    """A receiver's notice that it has room, with the (group, position) of its missing pages as
    little-endian int32 pairs."""

    transfer: Transfer
    missing: bytes


class Offer(Struct, frozen=True, tag=True):
    """A sender's offer: its page number for each missing page, little-endian int32.

    :param stages: 0 if all is written.  Otherwise the number of stages of layers
        (:func:`~kvell.pages.stages.stages_of`) in which the pages are being computed; the same
        offer follows when they are complete, with ``private``.
    """

    transfer: Transfer
    pages: bytes
    private: bytes = b""
    stages: int = 0


class Written(Struct, frozen=True, tag=True):
    """A sender's notice that its pass has written the stages up to this one, counted from 0.

    Only ``PullExecutor`` uses it.  It may be lost, late or duplicated.
    """

    transfer: Transfer
    stage: int


class Pulled(Struct, frozen=True, tag=True):
    """A receiver's notice that it has copies and no longer reads the sender's pages."""

    transfer: Transfer


class Abandon(Struct, frozen=True, tag=True):
    """A notice that the transfer has ended on this side, with the reason."""

    transfer: Transfer
    why: str


class Ask(Struct, frozen=True, tag=True):
    """A request to copy the cached part of a text, if it has more than ``beyond`` tokens.

    :param incarnation: the asker's incarnation; ``number`` is unique in it.
    :param tokens: the text, little-endian int32.
    :param ticks_left: the time after which the asker gives up.
    """

    incarnation: int
    number: int
    fingerprint: str
    tokens: bytes
    root: str
    model: str
    beyond: int
    ticks_left: int
    contents: bytes = b""


class Declined(Struct, frozen=True, tag=True):
    """A refusal to send a requested text, with the reason."""

    incarnation: int
    number: int
    why: str


PeerMessage = Prepare | Prepared | Offer | Written | Pulled | Abandon | Ask | Declined | LoanMessage
"""Any message between instances, also about loans."""
