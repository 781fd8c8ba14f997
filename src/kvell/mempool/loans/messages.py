"""Messages between instances about one loan of memory.

A loan is one *section*: 512 tokens of one request, in all groups with full attention.  The *debtor*
stores its pages in pages of the *creditor*, and reads them there.

::

    debtor                                   creditor
      │ ── Borrow(pages of each group) ─────► │  holds empty pages, or refuses
      │ ◄── Lent(right, pages) ────────────── │
      │ ── Fill(the debtor's pages) ────────► │  pulls them
      │ ◄── Filled ────────────────────────── │  the debtor may reuse its pages
      │          … the debtor reads …         │
      │ ◄── Recall ────────────────────────── │  needs the memory, and revokes at a deadline
      │ ── GiveBack ────────────────────────► │  the pages are free
      │ ◄── GivenBack ─────────────────────── │

A second request over the same text *shares* a valid loan: ``Borrow`` names it, and ``Fill`` has no
pages, since no page is pulled.  Each of the two loans has its own right; the pages are free once
both loans have ended.

Either side may end a loan with ``LoanOver`` at any moment.  Messages may be lost, late or
duplicated.  ``Borrow``, ``Fill``, ``Recall`` and ``GiveBack`` are resent until they are answered.
A message for an unknown loan is answered with ``LoanOver``, except ``LoanOver`` and ``GivenBack``
themselves.  A ``LoanOver`` may be old, so a debtor that has received ``Lent`` forgets the loan only
when it receives ``GivenBack``, or when the creditor is dead.

``Borrow`` and its answer are ``try_move_kvcache(req_id, num_blocks) -> bool`` of Infinite-LLM's
Listing 1.  Source: its §6.2.
"""

from msgspec import Struct


class Loan(Struct, frozen=True, order=True):
    """The name of a loan: the debtor, its incarnation, and a number that it never uses again."""

    debtor: str
    incarnation: int
    number: int


class Borrow(Struct, frozen=True, tag=True):
    """A debtor's request for pages.

    :param counts: pages of each group, little-endian int32.
    :param ticks_left: the time after which the debtor gives up, unless the pages are filled.
    :param shares: the number of a loan of the same incarnation whose pages to share; 0: lend empty
        pages.
    """

    loan: Loan
    fingerprint: str
    counts: bytes
    ticks_left: int
    model: str = ""
    shares: int = 0


class Lent(Struct, frozen=True, tag=True):
    """A creditor's grant of empty pages.

    :param incarnation: the creditor's incarnation.
    :param right: the number of the creditor's right, valid from ``Filled`` on while the pages may
        be read.
    :param pages: the creditor's pages in the order of groups, little-endian int32.
    """

    loan: Loan
    incarnation: int
    right: int
    pages: bytes


class Fill(Struct, frozen=True, tag=True):
    """A debtor's request to pull pages into the lent ones.

    :param right: the right in the :class:`Lent` that this answers.
    :param number: the number of the transfer by which the creditor may read the debtor's pages.
        Its sender and incarnation are those of the loan.
    :param pages: the debtor's pages, in the order of the lent ones; little-endian int32.
    :param source: another creditor that has these pages, which the debtor may read by the right
        ``number``; ``incarnation`` is that creditor's.  "" if they are the debtor's own.
    :param step_ticks: the duration of the debtor's steps; it returns no pages during a step.
    """

    loan: Loan
    right: int
    number: int
    pages: bytes
    source: str = ""
    incarnation: int = 0
    step_ticks: int = 0


class Filled(Struct, frozen=True, tag=True):
    """A creditor's notice that the pages may be read, and the debtor's own are no longer read."""

    loan: Loan


class Recall(Struct, frozen=True, tag=True):
    """A creditor's recall: the pages are revoked in ``ticks_left``, or already if it is 0."""

    loan: Loan
    ticks_left: int


class GiveBack(Struct, frozen=True, tag=True):
    """A debtor's notice that it no longer reads the pages."""

    loan: Loan


class GivenBack(Struct, frozen=True, tag=True):
    """A creditor's confirmation that it no longer has the loan."""

    loan: Loan


class LoanOver(Struct, frozen=True, tag=True):
    """A notice that the loan is refused or has ended on this side, with the reason."""

    loan: Loan
    why: str


LoanMessage = Borrow | Lent | Fill | Filled | Recall | GiveBack | GivenBack | LoanOver
