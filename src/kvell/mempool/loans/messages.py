"""Messages between instances about one loan of memory.

A loan is one *section*: 512 tokens of one request, in all groups with full attention.  The *debtor*
puts its pages into pages of the *creditor*, and reads them there.

::

    debtor                                   creditor
      │ ── Borrow(pages of each group) ─────► │  holds empty pages, or refuses
      │ ◄── Lent(right, pages) ────────────── │
      │ ── Fill(the debtor's pages) ────────► │  pulls them
      │ ◄── Filled ────────────────────────── │  the debtor's pages are its own again
      │          … the debtor reads …         │
      │ ◄── Recall ────────────────────────── │  needs the memory, and revokes at a deadline
      │ ── GiveBack ────────────────────────► │  the pages are free
      │ ◄── GivenBack ─────────────────────── │

A second request over the same text *shares* a loan that stands: ``Borrow`` names it, and ``Fill``
has no pages then, since nothing is pulled.  Each of the two is a loan of its own, with its own
right; the pages are free once both are over.

Either side may end a loan with ``LoanOver`` at any moment.  Messages may be lost, late or doubled.
``Borrow``, ``Fill``, ``Recall`` and ``GiveBack`` are said again until they are answered.  What
belongs to no loan is answered with ``LoanOver``, except ``LoanOver`` and ``GivenBack`` themselves.
A ``LoanOver`` may be old, so a debtor that has heard ``Lent`` forgets the loan only when it hears
``GivenBack``, or that the creditor is no more.

``Borrow`` and its answer are ``try_move_kvcache(req_id, num_blocks) -> bool`` of Infinite-LLM's
Listing 1.  Source: its §6.2.
"""

from msgspec import Struct


class Loan(Struct, frozen=True, order=True):
    """Names a loan: the debtor, its incarnation, and a number that it never uses again."""

    debtor: str
    incarnation: int
    number: int


class Borrow(Struct, frozen=True, tag=True):
    """Lend me pages.

    :param fingerprint: of the debtor's layout.
    :param counts: pages of each group, little-endian int32.
    :param ticks_left: until the debtor gives up, unless the pages are filled by then.
    :param model: whose groups they are.
    :param shares: number of a loan of the same incarnation, whose pages are lent once more; 0:
        empty ones are.
    """

    loan: Loan
    fingerprint: str
    counts: bytes
    ticks_left: int
    model: str = ""
    shares: int = 0


class Lent(Struct, frozen=True, tag=True):
    """These pages are lent, and empty.

    :param incarnation: of the creditor.
    :param right: number of the word in the creditor's rights that stands from ``Filled`` on, as
        long as the pages may be read.
    :param pages: of the creditor, in the order of groups; little-endian int32.
    """

    loan: Loan
    incarnation: int
    right: int
    pages: bytes


class Fill(Struct, frozen=True, tag=True):
    """Pull these pages into those that are lent.

    :param right: as in :class:`Lent`, which this answers.
    :param number: of the transfer for which the creditor may read the debtor's pages.  Its sender
        and incarnation are those of the loan.
    :param pages: of the debtor, one for each that is lent, in the same order; little-endian int32.
    :param source: another creditor whose pages these are, which the debtor may read by the right
        ``number``, and its ``incarnation``; "" if they are the debtor's own.
    :param step_ticks: how long the debtor's steps take: it gives back nothing in the middle of one.
    """

    loan: Loan
    right: int
    number: int
    pages: bytes
    source: str = ""
    incarnation: int = 0
    step_ticks: int = 0


class Filled(Struct, frozen=True, tag=True):
    """The pages are filled and may be read; the debtor's own are not read any more."""

    loan: Loan


class Recall(Struct, frozen=True, tag=True):
    """Give the pages back; ``ticks_left`` until they are revoked, 0 if they are already."""

    loan: Loan
    ticks_left: int


class GiveBack(Struct, frozen=True, tag=True):
    """The debtor does not read the pages any more."""

    loan: Loan


class GivenBack(Struct, frozen=True, tag=True):
    """The creditor has no such loan any more."""

    loan: Loan


class LoanOver(Struct, frozen=True, tag=True):
    """The loan is refused, or over on this side, and why."""

    loan: Loan
    why: str


LoanMessage = Borrow | Lent | Fill | Filled | Recall | GiveBack | GivenBack | LoanOver
