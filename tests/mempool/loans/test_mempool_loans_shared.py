"""Loans over pages that another loan of the same debtor has."""

import pytest

from kvell.mempool.exchanges import FIRST_TICKS
from kvell.mempool.loans.actions import UNKNOWN
from kvell.mempool.loans.debtor_ledger import DebtorLedger
from kvell.mempool.loans.messages import Loan
from tests.mempool.loans.lenders import LENDING_MIXES, LoanNetwork
from tests.mempool.loans.quiet import lend_pages, over, quiet, used


def shared(mix: str = "full") -> tuple[LoanNetwork, Loan, Loan]:
    """A loan of 3 pages, and another one over the same pages; both may be read."""
    network = quiet(mix)
    first = network.lend("a", "b", 3)
    second = network.share("a", first, 100)
    network.run()
    assert network.user("a").filled == [first, second]
    return network, first, second


@pytest.mark.parametrize("mix", list(LENDING_MIXES))
def test_a_loan_is_shared_and_takes_no_memory(mix: str) -> None:
    network = quiet(mix)
    first = network.lend("a", "b", 3)
    before = used(network.instances["b"])
    second = network.share("a", first, 100)
    assert list(network.borrowing("a").readable) == [first], "not before it is answered"
    network.run()
    standing = network.borrowing("a").readable
    assert standing[first].pages == standing[second].pages
    assert standing[first].right != standing[second].right
    assert used(network.instances["b"]) == before
    assert network.pages_lent("b") == {"a": tuple(network.counts(3))}
    assert len(network.lending("b")) == 2 and network.believed() == 2
    network.pass_time(1 << 40)
    assert network.believed() == 2, "what is read has no deadline"


@pytest.mark.parametrize("ends_first", [0, 1])
def test_pages_are_lent_until_all_who_share_them_are_done(ends_first: int) -> None:
    network, *loans = shared()
    network.give_back("a", loans[ends_first])
    network.run()
    assert network.pages_lent("b") == {"a": tuple(network.counts(3))}
    assert network.believed() == 1
    third = network.share("a", loans[1 - ends_first], 100)
    network.run()
    network.give_back("a", loans[1 - ends_first])
    network.run()
    assert network.believed() == 1
    network.give_back("a", third)
    over(network)


def test_a_shared_loan_fits_where_no_further_one_does() -> None:
    network = quiet("full", 3)
    first = network.lend("a", "b", 3)
    while network.lend("a", "b", 1) not in network.user("a").refused:
        pass
    second = network.share("a", first, 100)
    network.run()
    assert second in network.user("a").filled


def test_shared_pages_are_recalled_from_all() -> None:
    network, first, second = shared()
    network.recall("b", 2, 100)
    network.run()
    assert set(network.user("a").recalled) == {first, second}
    network.recall("b", 2, 100)
    assert not network.messages, "they are on their way back"
    network.give_back("a", first)
    network.run()
    assert network.lending("b").lends and network.believed() == 1
    network.pass_time(100)
    assert not network.lending("b").lends and set(network.user("a").lost) == {second}
    over(network)


def test_the_first_part_of_a_text_is_recalled_last_though_it_was_shared_late() -> None:
    network = quiet()
    first, last = (network.lend("a", "b", 1) for _ in range(2))
    network.share("a", first, 100)
    network.run()
    network.recall("b", 1, 100)
    network.run()
    assert set(network.user("a").recalled) == {last}


def test_what_nobody_reads_yet_ends_at_once_and_what_it_shares_is_recalled() -> None:
    network, first = lend_pages()
    second = network.share("a", first, 1000)
    network.deliver(0)  # it is granted there
    network.recall("b", 1, 100)
    network.run()
    assert set(network.user("a").recalled) == {first}
    assert set(network.user("a").refused) | set(network.user("a").lost) == {second}
    network.give_back("a", first)
    over(network)


def test_a_loan_that_is_wanted_back_is_not_shared() -> None:
    network, first = lend_pages()
    network.recall("b", 1, 1000)
    second = network.share("a", first, 100)
    network.run()
    assert network.user("a").refused == {second: UNKNOWN}
    assert network.believed() == 1


def test_a_loan_that_was_given_back_meanwhile_is_not_shared() -> None:
    network, first = lend_pages()
    second = network.share("a", first, 100)
    network.give_back("a", first)
    network.deliver(1)
    network.run()
    assert network.user("a").refused == {second: UNKNOWN}
    over(network)


def test_it_is_shared_by_whoever_asks_in_time() -> None:
    """The loan is given back, but the creditor hears of the other one first."""
    network, first = lend_pages()
    second = network.share("a", first, 100)
    network.give_back("a", first)
    network.run()
    assert network.user("a").filled == [second] and network.believed() == 1
    network.give_back("a", second)
    over(network)


@pytest.mark.parametrize("lost", range(4))
def test_whatever_gets_lost_is_said_again(lost: int) -> None:
    """``Borrow``, its answer, ``Fill``, or its answer."""
    network, first = lend_pages()
    second = network.share("a", first, 100_000)
    for _ in range(lost):
        network.deliver(0)
    (message,) = network.messages
    assert type(message[3]).__name__ == ("Borrow", "Lent", "Fill", "Filled")[lost]
    network.deliver(0, loses=True)
    network.run()
    assert network.user("a").filled == [first]
    network.pass_time(FIRST_TICKS)
    network.run()
    assert network.user("a").filled == [first, second] and network.believed() == 2


@pytest.mark.parametrize("silent", range(3))
def test_who_is_not_answered_in_time_goes_on_without(silent: int) -> None:
    """Nothing arrives from some moment on; the creditor holds the pages for the other loan."""
    network, first = lend_pages()
    second = network.share("a", first, 100)
    for _ in range(silent):
        network.deliver(0)
    network.messages.clear()
    network.pass_time(101)
    assert set(network.user("a").refused) | set(network.user("a").lost) == {second}
    network.run()
    assert len(network.lending("b")) == 1 and network.believed() == 1
    network.give_back("a", first)
    over(network)


def test_loans_end_with_their_debtor() -> None:
    network, *_ = shared()
    network.crash("a")
    over(network)


def test_loans_are_lost_with_their_creditor() -> None:
    network, first, second = shared()
    network.crash("b")
    assert set(network.user("a").lost) == {first, second}
    over(network)


def test_who_drains_shares_nothing_more() -> None:
    network, first = lend_pages()
    network.drain("a")
    second = network.share("a", first, 100)
    assert network.user("a").refused == {second: "the instance is draining"}


def test_only_what_stands_can_be_shared() -> None:
    network = quiet()
    asked = network.borrow("a", "b", 2, 100)
    borrowing: DebtorLedger = network.borrowing("a")
    for loan, ticks in ((asked, 100), (Loan("a", 1, 99), 100)):
        with pytest.raises(ValueError, match="is not valid"):
            borrowing.share(loan, 0, ticks)
    first = network.lend("a", "b", 2)
    with pytest.raises(ValueError, match="ends too soon"):
        borrowing.share(first, 0, 0)
