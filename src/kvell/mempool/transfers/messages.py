"""Messages between instances about one transfer.

::

    sender                                   receiver
      │ ── Prepare(text, computed) ─────────► │  holds what it has of it, and pages for the rest
      │ ◄── Prepared(what is missing) ─────── │
      │ ── Offer(where that lies) ──────────► │  pulls it
      │ ◄── Pulled ────────────────────────── │  the sender's pages are its own again

A text that is being computed is offered twice: with its ``stages`` when the pass begins, and once
more when it is there.  In between the sender says with ``Written`` how far the pass has come, which
is a hint: whatever the receiver has not brought by the second offer, it brings then.

Either side may end it with ``Abandon`` at any moment.  Messages may be lost, late or doubled: what
is not answered is said again, what belongs to no transfer is answered with ``Abandon``, and
deadlines end what is never answered.
"""

from msgspec import Struct

from kvell.mempool.loans.messages import LoanMessage

MOST_TICKS = 1_200_000
"""Longest time, 20 minutes, for which an instance holds pages since another asks for it."""


class Transfer(Struct, frozen=True, order=True):
    """Names a transfer: the sender, its incarnation, and a number that it never uses again."""

    sender: str
    incarnation: int
    number: int


class Prepare(Struct, frozen=True, tag=True):
    """Make room for the first ``computed`` tokens of a text.

    :param fingerprint: of the sender's layout.
    :param tokens: the text, little-endian int32.
    :param ticks_left: until the sender gives up.
    :param inserts: whether the receiver caches the text, or hands it to its waiting user.
    :param private: for the receiver's user.
    :param images: where they are in the text: first token, tokens, image tokens, of each in order;
        little-endian int32.
    :param contents: what those of the text's ids stand for that name something by content, and
        ``attached``: what came with the text; both for those who do I/O, which take them off.
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
    """There is room; ``missing`` are (group, position) of pages, little-endian int32 pairs."""

    transfer: Transfer
    missing: bytes


class Offer(Struct, frozen=True, tag=True):
    """The missing pages lie here: one page id of the sender for each, little-endian int32.

    :param private: for the receiver's user.
    :param stages: 0: all is written.  Else the pages are being computed, in so many stages of
        layers (:func:`~kvell.pages.stages.stages_of`), and the same offer comes again when they
        are, with ``private``.
    """

    transfer: Transfer
    pages: bytes
    private: bytes = b""
    stages: int = 0


class Written(Struct, frozen=True, tag=True):
    """The pass has written the stages up to this one, counted from 0.

    Only the mover needs it.  It may get lost, or come late or twice.
    """

    transfer: Transfer
    stage: int


class Pulled(Struct, frozen=True, tag=True):
    """The receiver has copies; the sender's pages are not read any more."""

    transfer: Transfer


class Abandon(Struct, frozen=True, tag=True):
    """The transfer is over on this side, and why."""

    transfer: Transfer
    why: str


class Ask(Struct, frozen=True, tag=True):
    """Copy what is cached of a text to me, if that is more than ``beyond`` tokens.

    :param incarnation: of the asker, whose ask has this ``number``.
    :param tokens: the text, little-endian int32.
    :param ticks_left: until the asker does without.
    :param contents: as in :class:`Prepare`.
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
    """An ask is not answered with a text, and why."""

    incarnation: int
    number: int
    why: str


PeerMessage = Prepare | Prepared | Offer | Written | Pulled | Abandon | Ask | Declined | LoanMessage
"""Everything that one instance says to another, of loans too."""
