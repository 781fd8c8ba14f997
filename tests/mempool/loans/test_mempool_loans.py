"""Loans between two or three instances, step by step."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvell.mempool.entries import Draining, Heard, PeerLost, PullEnded
from kvell.mempool.exchanges import FIRST_TICKS
from kvell.mempool.loans.creditor_ledger import (
    DRAIN_TICKS,
    MOST_LOANS_OF_DEBTOR,
    MOST_STEP_TICKS,
    most_lendable,
)
from kvell.mempool.loans.messages import (
    Borrow,
    Fill,
    Filled,
    GiveBack,
    GivenBack,
    Lent,
    Loan,
    LoanMessage,
    LoanOver,
    Recall,
)
from kvell.mempool.transfers.actions import Action, Grant, Pull, Revoke, Send, StopPull
from kvell.mempool.transfers.messages import MOST_TICKS, Abandon, PeerMessage, Prepare, Transfer
from tests.mempool.agent_audit import audit_loans, lent_pages
from tests.mempool.loans.lenders import LENDING_MIXES, LoanNetwork
from tests.mempool.loans.quiet import begin_filling, lend_pages, over, quiet, used
from tests.mempool.seen import lent_of
from tests.mempool.transfers.network import ints


def allow(network: LoanNetwork, most: int) -> None:
    network.lending("b").most_loans = most


def hear(network: LoanNetwork, name: str, peer: str, message: PeerMessage) -> list[Action]:
    return network.instances[name].agent.handle(Heard(peer, message))


def borrow_of(network: LoanNetwork, name: str = "a", number: int = 1, **changes: Any) -> Borrow:
    fields: dict[str, Any] = {
        "loan": Loan(name, network.instances[name].incarnation, number),
        "fingerprint": network.instances[name].agent.fingerprint,
        "counts": ints(network.counts(2)).tobytes(),
        "ticks_left": 100,
    }
    return Borrow(**{**fields, **changes})


def refusal(actions: list[Action]) -> str:
    (action,) = actions
    assert isinstance(action, Send) and isinstance(action.message, LoanOver)
    return action.message.why


@pytest.mark.parametrize("mix", list(LENDING_MIXES))
def test_a_section_is_lent_filled_read_and_given_back(mix: str) -> None:
    network = quiet(mix)
    loan = network.borrow("a", "b", 3, 100)
    assert network.borrowing("a").readable == {}
    network.run()
    assert network.user("a").granted == [loan]
    assert network.fill("a", loan)
    network.run()
    assert network.user("a").filled == [loan]
    assert not used(network.instances["a"]), "the debtor's pages are its own again"
    assert network.pages_lent("b") == {"a": tuple(network.counts(3))}
    assert network.believed() == 1 and network.num_right_reads == 1
    network.pass_time(1 << 40)
    assert network.believed() == 1, "a loan that is read has no deadline"
    network.give_back("a", loan)
    assert network.borrowing("a").readable == {}
    over(network)
    assert network.user("a").lost == {} and network.pages_lent("b") == {}


def test_what_stands_names_the_pages_by_group_in_the_order_in_which_they_were_filled() -> None:
    network = quiet("two")
    loan = network.lend("a", "b", 3)
    (standing,) = network.borrowing("a").readable.values()
    creditor = network.instances["b"]
    assert [len(pages) for pages in standing.pages] == [3, 4]
    assert (standing.peer, standing.incarnation) == ("b", creditor.incarnation)
    assert standing.deadline is None
    for group, pages in enumerate(standing.pages):
        for index, page in enumerate(pages):
            right = (loan.incarnation, loan.number, group, index, 1 << 25)
            assert creditor.content[group, page] == right


def test_the_right_to_read_stands_from_when_the_pages_are_filled() -> None:
    network = quiet()
    creditor = network.instances["b"]
    loan = network.borrow("a", "b", 2, 100)
    network.run()
    assert not creditor.granted
    network.fill("a", loan)
    network.deliver(0)
    assert not creditor.granted and len(creditor.copying) == 1
    (transfer,) = creditor.copying
    network.copy("b", 0, 99)
    (right,) = creditor.granted
    assert right.sender == "b" and network.granted_pages[right] == lent_pages(network.lending("b"))
    assert network.instances["a"].granted == {transfer}, "until it hears that they are filled"
    network.run()
    assert network.instances["a"].granted == set()


def test_loans_and_transfers_have_numbers_of_one_counter() -> None:
    network, text = quiet("full", 60), list(range(12))
    network.instances["b"].compute(text)
    network.lend("a", "b")
    network.send("b", "a", text, True, 100)
    network.lend("a", "b")
    rights = [one.right for one in network.borrowing("a").readable.values()]
    sent = [one.number for one in network.instances["b"].ended]
    network.run()
    sent = [one.number for one in network.instances["b"].ended]
    assert (rights, sent) == ([1, 3], [2])


def test_several_debtors_are_served_in_the_order_in_which_they_ask() -> None:
    network = quiet("full", 4)  # 8 pages, 7 of which may be lent
    first = network.borrow("a", "b", 4, 100)
    second = network.borrow("c", "b", 4, 100)
    network.run()
    assert network.user("a").granted == [first]
    assert network.user("c").refused == {second: "there is no room"}
    assert network.pages_lent("b") == {"a": (4,)}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fingerprint": "another"}, "the layouts of the two instances differ"),
        ({"counts": b"\0" * 8}, "there are no such pages"),
        ({"counts": b""}, "there are no such pages"),
        ({"counts": b"\1\0\0\0\1"}, "there are no such pages"),
        ({"counts": ints([1]).tobytes()}, "there are no such pages"),
        ({"counts": ints([1, 1, 1]).tobytes()}, "there are no such pages"),
        ({"counts": ints([2, -1]).tobytes()}, "there are no such pages"),
        ({"counts": ints([1 << 30, 1 << 30]).tobytes()}, "there is no room"),
        ({"ticks_left": 0}, "its deadline has passed"),
        ({"ticks_left": -5}, "its deadline has passed"),
        ({"loan": Loan("c", 3, 1)}, "it is in another instance's name"),
        ({"model": "another"}, "no group of the pool belongs to model 'another'"),
    ],
)
def test_what_a_stranger_asks_for_is_refused_with_its_reason(
    changes: dict[str, Any], why: str
) -> None:
    network = quiet()
    said = refusal(hear(network, "b", "a", borrow_of(network, **changes)))
    assert said == why
    assert not used(network.instances["b"]) and not len(network.lending("b"))


def test_a_group_without_full_attention_is_never_lent() -> None:
    network = quiet("all")
    groups = network.instances["b"].core.layout.groups
    assert most_lendable(groups, 20) == [38, 0, 0]
    borrow = borrow_of(network, counts=ints([1, 1, 0]).tobytes())
    assert refusal(hear(network, "b", "a", borrow)) == "there is no room"


def test_no_more_is_lent_than_most_pages_of_a_group() -> None:
    network = quiet("full", 20)  # 40 pages, 38 of which may be lent
    for _ in range(3):
        network.lend("a", "b", 11)
    loan = network.lend("a", "b", 6)
    assert network.user("a").refused == {loan: "there is no room"}
    network.lend("a", "b", 5)
    assert network.pages_lent("b") == {"a": (38,)}
    network.give_back("a", network.user("a").filled[0])
    network.run()
    assert network.lend("a", "b", 11) in network.user("a").filled


def test_a_creditor_whose_requests_need_the_memory_has_no_room() -> None:
    network = quiet("full", 4)
    creditor = network.instances["b"]
    owner = creditor.owner("alloc")
    creditor.holds.hold_pages(owner, 1 << 60, ints([6]))
    loan = network.lend("a", "b", 3)
    assert network.user("a").refused == {loan: "there is no room"}
    assert network.lend("a", "b", 2) in network.user("a").filled
    creditor.holds.release(owner)


def test_one_debtor_has_so_many_loans_at_most() -> None:
    network = quiet("full", 20)
    allow(network, 2)
    loans = [network.lend("a", "b", 1) for _ in range(3)]
    assert network.user("a").refused == {loans[2]: "too many loans"}
    assert network.lend("c", "b", 1) in network.user("c").filled
    assert MOST_LOANS_OF_DEBTOR == 1024


def test_loans_that_were_revoked_count_until_the_debtor_has_heard_it() -> None:
    network = quiet("full", 20)
    allow(network, 1)
    network.lend("a", "b", 1)
    network.recall("b", 1, 0)
    assert refusal(hear(network, "b", "a", borrow_of(network, number=9))) == "too many loans"
    network.run()
    assert network.lend("a", "b", 1) in network.user("a").filled


def test_a_user_asks_for_pages_and_time() -> None:
    borrowing = quiet().borrowing("a")
    for counts, ticks in ([], 5), ([0, 0], 5), ([1, -1], 5), ([1, 1], 0):
        with pytest.raises(ValueError, match="has pages, and time"):
            borrowing.borrow("b", counts, 0, ticks)


def test_an_instance_does_not_lend_to_itself() -> None:
    network = quiet()
    loan = network.borrow("a", "a", 1, 10)
    assert network.user("a").refused == {loan: "an instance does not lend to itself"}
    assert not network.messages


def test_a_debtor_lends_nothing_and_a_creditor_borrows_nothing() -> None:
    network = quiet()
    network.lend("a", "b")
    loan = network.lend("c", "a")
    assert network.user("c").refused == {loan: "the instance borrows memory itself"}
    loan = network.lend("b", "c")
    assert network.user("b").refused == {loan: "the instance lends memory itself"}
    assert network.lend("c", "b") in network.user("c").filled


@pytest.mark.parametrize("state", ["asked", "granted", "filling", "returning"])
def test_a_debtor_in_any_state_lends_nothing(state: str) -> None:
    network = quiet()
    loan = network.borrow("a", "b", 2, 100)
    if state != "asked":
        network.run()
    if state in ("filling", "returning"):
        network.fill("a", loan)
    if state == "returning":
        network.give_back("a", loan)
    said = refusal(hear(network, "a", "c", borrow_of(network, "c")))
    assert said == "the instance borrows memory itself"


def test_two_instances_that_ask_each_other_are_both_refused_and_come_to_rest() -> None:
    network = quiet()
    one, other = network.borrow("a", "b", 2, 100), network.borrow("b", "a", 2, 100)
    network.run()
    assert network.user("a").refused == {one: "the instance borrows memory itself"}
    assert network.user("b").refused == {other: "the instance borrows memory itself"}
    over(network)
    assert network.lend("a", "b") in network.user("a").filled


@pytest.mark.parametrize("lost", range(6))
def test_any_message_may_get_lost_once(lost: int) -> None:
    """Borrow, Lent, Fill, Filled, GiveBack and GivenBack: what is not answered is said again."""
    network = quiet()
    seen = 0

    def run() -> None:
        nonlocal seen
        for _ in range(3):
            while network.messages:
                network.deliver(0, loses=seen == lost)
                seen += 1
                network.copy("b", 0, 99)
            network.pass_time(FIRST_TICKS)

    loan = network.borrow("a", "b", 2, 100_000)
    run()
    network.fill("a", loan)
    run()
    assert network.user("a").filled == [loan] and network.believed() == 1
    network.give_back("a", loan)
    run()
    assert seen > 6
    over(network)


@pytest.mark.parametrize("doubled", [Borrow, Lent, Fill, Filled, GiveBack, GivenBack])
def test_any_message_may_be_doubled_and_come_late(doubled: type[LoanMessage]) -> None:
    network = quiet()
    late: list[tuple[str, int, str, PeerMessage]] = []

    def run() -> None:
        while network.messages or network.instances["b"].copying:
            if network.messages:
                if isinstance(network.messages[0][3], doubled):
                    late.append(network.messages[0])
                    network.deliver(0, keeps=True)
                network.deliver(0)
            network.copy("b", 0, 99)

    loan = network.borrow("a", "b", 2, 100_000)
    run()
    network.fill("a", loan)
    run()
    network.messages += late
    run()
    assert network.user("a").filled == [loan] and network.believed() == 1
    network.give_back("a", loan)
    run()
    network.messages += late
    network.run()
    network.pass_time(1 << 40)
    over(network)
    assert late and network.user("a").lost == {}


def test_what_is_said_again_says_what_time_is_left_by_then() -> None:
    network = quiet()
    network.borrow("a", "b", 2, 10_000)
    network.pass_time(FIRST_TICKS)
    left = [one[3].ticks_left for one in network.messages if isinstance(one[3], Borrow)]
    assert left == [10_000, 10_000 - FIRST_TICKS]


def test_a_reservation_that_was_made_twice_is_not_filled_with_pages_of_the_first() -> None:
    """A late ``Borrow`` is granted anew; the debtor still knows the pages of the first ``Lent``."""
    network = quiet()
    loan = network.borrow("a", "b", 2, 100)
    network.deliver(0, keeps=True)
    late = network.messages.pop(0)
    first = lent_of(network.lending("b"))[loan].right.number
    network.messages, lent = [], network.messages
    network.act(network.instances["b"], hear(network, "b", "a", LoanOver(loan, "")))
    network.messages = [late]
    network.deliver(0)
    assert lent_of(network.lending("b"))[loan].right.number != first
    network.messages = lent
    network.run()
    network.fill("a", loan)
    network.run()
    assert network.user("a").lost == {loan: "there is no such loan"}
    over(network)


def test_an_old_refusal_of_a_loan_that_stands_ends_it_on_both_sides() -> None:
    network, loan = lend_pages()
    old = LoanOver(loan, "there is no room")
    network.act(network.instances["a"], hear(network, "a", "b", old))
    assert network.user("a").lost == {loan: "there is no room"}
    over(network)


def test_a_loan_that_was_refused_by_time_and_is_granted_then_ends() -> None:
    network = quiet()
    loan = network.borrow("a", "b", 2, 10)
    late = network.messages.pop()
    network.pass_time(10)
    assert network.user("a").refused == {loan: "it timed out"}
    network.messages = [late]
    network.deliver(0)
    assert used(network.instances["b"])
    over(network)


STRANGE: list[Callable[[Loan], LoanMessage]] = [
    lambda loan: Lent(loan, 1, 1, b""),
    Filled,
    lambda loan: Recall(loan, 5),
    lambda loan: Fill(loan, 1, 1, b""),
]


@pytest.mark.parametrize("message", STRANGE)
def test_what_belongs_to_no_loan_is_answered_with_that(
    message: Callable[[Loan], LoanMessage],
) -> None:
    network = quiet()
    for debtor in "ab":
        strange = message(Loan(debtor, 99, 99))
        assert refusal(hear(network, "a", "b", strange)) == "there is no such loan"


def test_what_ends_a_loan_is_not_answered_forever() -> None:
    network, loan = quiet(), Loan("a", 99, 99)
    for message in LoanOver(loan, ""), GivenBack(loan):
        assert hear(network, "a", "b", message) == []
        assert hear(network, "b", "a", message) == []
    assert hear(network, "b", "a", GiveBack(loan)) == [Send("a", GivenBack(loan))]


@pytest.mark.parametrize("message", [GiveBack, lambda loan: LoanOver(loan, "")])
def test_nobody_ends_a_loan_of_others(message: Callable[[Loan], LoanMessage]) -> None:
    network, loan = lend_pages()
    for name in "ab":
        actions = hear(network, name, "c", message(loan))
        assert all(isinstance(one, Send) and one.instance == "c" for one in actions)
    assert network.believed() == 1


@pytest.mark.parametrize("message", [Filled, GivenBack, lambda loan: Recall(loan, 0)])
def test_what_an_other_than_the_creditor_says_does_not_count(
    message: Callable[[Loan], LoanMessage],
) -> None:
    network, loan = lend_pages()
    hear(network, "a", "c", message(loan))
    assert network.borrowing("a").readable.keys() == {loan}


@pytest.mark.parametrize(
    "message",
    [
        Borrow(Loan("a", 1, 2), "f", b"1234", 5, "m"),
        Lent(Loan("a", 1, 2), 3, 4, b"1234"),
        Fill(Loan("a", 1, 2), 4, 5, b"1234"),
        Filled(Loan("a", 1, 2)),
        Recall(Loan("a", 1, 2), 5),
        GiveBack(Loan("a", 1, 2)),
        GivenBack(Loan("a", 1, 2)),
        LoanOver(Loan("a", 1, 2), "why"),
    ],
)
def test_messages_travel_among_those_of_transfers(message: LoanMessage) -> None:
    encoded = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(encoded, type=PeerMessage) == message


@pytest.mark.parametrize(
    ("right", "pages"),
    [(1, b""), (1, ints([1]).tobytes()), (1, b"abc"), (0, None), (-4, None), (1, "negative")],
)
def test_pages_that_were_not_asked_for_are_no_loan(right: int, pages: bytes | str | None) -> None:
    network = quiet("full")
    loan = network.borrow("a", "b", 2, 100)
    told = {None: ints([3, 4]), "negative": ints([3, -4])}
    encoded = pages if isinstance(pages, bytes) else told[pages].tobytes()
    actions = hear(network, "a", "b", Lent(loan, 1, right, encoded))
    network.act(network.instances["a"], actions)
    problem = "the lent pages differ from the request"
    assert network.user("a").refused == {loan: problem}
    over(network)


@pytest.mark.parametrize(
    ("number", "pages"),
    [(7, b""), (7, ints([1]).tobytes()), (7, b"abc"), (0, None), (-4, None), (7, "negative")],
)
def test_a_loan_is_not_filled_from_what_are_no_pages(
    number: int, pages: bytes | str | None
) -> None:
    network = quiet("full")
    loan = network.borrow("a", "b", 2, 100)
    network.run()
    told = {None: ints([3, 4]), "negative": ints([3, -4])}
    encoded = pages if isinstance(pages, bytes) else told[pages].tobytes()
    right = lent_of(network.lending("b"))[loan].right.number
    said = refusal(hear(network, "b", "a", Fill(loan, right, number, encoded)))
    assert said == "it cannot be filled from these pages"
    assert not used(network.instances["b"])


def test_one_transfer_does_not_fill_two_loans_nor_bring_a_text_too() -> None:
    network = quiet("full")
    debtor, creditor = network.instances["a"], network.instances["b"]
    loans = [network.borrow("a", "b", 1, 100) for _ in range(3)]
    network.run()
    rights = [lent_of(network.lending("b"))[loan].right.number for loan in loans]
    one = ints([1]).tobytes()
    first = hear(network, "b", "a", Fill(loans[0], rights[0], 7, one))
    assert isinstance(first[0], Pull)
    second = hear(network, "b", "a", Fill(loans[1], rights[1], 7, one))
    assert refusal(second) == "it cannot be filled from these pages"
    same, other = (Transfer("a", debtor.incarnation, number) for number in (7, 8))
    prepare = Prepare(same, creditor.agent.fingerprint, one, 1, "", "", 100, True)
    (abandon,) = hear(network, "b", "a", prepare)
    assert abandon == Send("a", Abandon(same, "it fills a loan"))
    hear(network, "b", "a", Prepare(other, creditor.agent.fingerprint, one, 1, "", "", 100, True))
    third = hear(network, "b", "a", Fill(loans[2], rights[2], 8, one))
    assert refusal(third) == "it cannot be filled from these pages"


def test_a_user_fills_once_and_with_as_many_pages() -> None:
    network = quiet("full")
    borrowing = network.borrowing("a")
    loan = network.borrow("a", "b", 2, 100)
    with pytest.raises(ValueError, match="does not wait for 2 pages"):
        borrowing.fill(loan, [1, 2])
    network.run()
    with pytest.raises(ValueError, match="does not wait for 3 pages"):
        borrowing.fill(loan, [1, 2, 3])
    network.fill("a", loan)
    with pytest.raises(ValueError, match="does not wait for 2 pages"):
        borrowing.fill(loan, [1, 2])
    network.give_back("a", loan)
    assert borrowing.fill(loan, [1, 2]) == [] and borrowing.give_back(loan) == []
    over(network)
    assert borrowing.fill(loan, [1, 2]) == [] and borrowing.give_back(loan) == []


def test_a_reservation_that_is_not_filled_expires() -> None:
    network = quiet()
    loan = network.borrow("a", "b", 2, 100)
    network.run()
    network.pass_time(99)
    assert used(network.instances["b"]) and network.user("a").granted == [loan]
    network.pass_time(1)
    assert not used(network.instances["b"])
    assert network.user("a").lost == {loan: "it timed out"}
    over(network)


def test_nobody_reserves_for_longer_than_instances_do() -> None:
    network = quiet()
    actions = hear(network, "b", "a", borrow_of(network, ticks_left=1 << 60))
    assert isinstance(actions[0], Send) and isinstance(actions[0].message, Lent)
    assert network.instances["b"].agent.next_deadline == MOST_TICKS


def test_a_pull_that_takes_too_long_ends_before_its_pages_are_others() -> None:
    network, loan = begin_filling()
    creditor = network.instances["b"]
    network.copy("b", 0, 1)
    network.pass_time(100)
    (copying,) = creditor.copying.values()
    assert copying.is_stopped and used(creditor), "somebody writes there"
    assert network.user("a").lost == {loan: "it timed out"}
    network.copy("b", 0, 0)
    assert not used(creditor)
    over(network)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_pull_that_fails_ends_the_loan(is_whole: bool) -> None:
    network, loan = begin_filling(100_000)
    if is_whole:
        network.copy("b", 0, 1)
    network.fail("b", 0)
    assert not used(network.instances["b"])
    if is_whole:  # the news of it gets lost
        network.messages.clear()
        network.pass_time(FIRST_TICKS)
    network.run()
    why = "there is no such loan" if is_whole else "copying failed"
    assert network.user("a").lost == {loan: why}
    over(network)


def test_a_debtor_that_gives_back_while_it_is_filled_has_its_pages_at_once() -> None:
    network, loan = begin_filling()
    network.copy("b", 0, 1)
    network.give_back("a", loan)
    assert not used(network.instances["a"]) and not network.instances["a"].granted
    network.deliver(0)
    assert used(network.instances["b"])
    over(network)
    assert network.user("a").lost == {}


def test_a_loan_that_is_given_back_before_the_answer_is_not_granted() -> None:
    network = quiet()
    loan = network.borrow("a", "b", 2, 100)
    network.give_back("a", loan)
    network.messages.reverse()  # the reservation is made behind that
    over(network)
    assert network.user("a").granted == [] and network.user("a").refused == {}


def test_a_recalled_loan_is_read_until_it_is_given_back() -> None:
    network, loan = lend_pages()
    network.recall("b", 1, 100)
    network.run()
    assert network.user("a").recalled == {loan: network.now + 100}
    assert network.borrowing("a").readable[loan].deadline == network.now + 100
    network.pass_time(99)
    assert network.believed() == 1
    network.give_back("a", loan)
    over(network)
    assert network.user("a").lost == {}


@pytest.mark.parametrize(
    ("step_ticks", "ticks"),
    [(0, 100), (40, 100), (300, 600), (10 * MOST_STEP_TICKS, 2 * MOST_STEP_TICKS), (-5, 100)],
)
def test_a_debtor_whose_steps_take_long_has_two_of_them(step_ticks: int, ticks: int) -> None:
    network = quiet()
    network.step_ticks = step_ticks
    loan = network.lend("a", "b")
    network.recall("b", 1, 100)
    network.run()
    assert network.user("a").recalled == {loan: network.now + ticks}
    network.pass_time(ticks - 1)
    assert network.lending("b").lends
    network.pass_time(1)
    assert not network.lending("b").lends
    over(network)


def test_what_is_taken_at_once_leaves_no_step() -> None:
    network = quiet()
    network.step_ticks = 300
    network.lend("a", "b")
    network.recall("b", 1, 0)
    assert not network.lending("b").lends
    network.run()
    over(network)


def test_a_creditor_that_needs_it_no_more_does_not_take_it() -> None:
    """Each time that the recall is said again the debtor hears of more time."""
    network, loan = lend_pages()
    network.recall("b", 1, 2 * FIRST_TICKS)
    network.run()
    network.lending("b").is_wanted = lambda: False
    for _ in range(9):
        network.pass_time(FIRST_TICKS)
        network.run()
    assert network.believed() == 1 and network.lending("b").lends
    assert list(network.user("a").recalled) == [loan]
    network.lending("b").is_wanted = lambda: True
    network.pass_time(9 * FIRST_TICKS)
    assert not network.lending("b").lends and network.user("a").lost
    network.run()
    over(network)


def test_one_that_drains_waits_for_nobody() -> None:
    network = quiet()
    network.lend("a", "b")
    network.lending("b").is_wanted = lambda: False
    network.lending("b").is_closed = True
    network.recall("b", 1, 100)
    network.run()
    network.pass_time(100)
    assert not network.lending("b").lends
    network.run()
    over(network)


def test_at_the_deadline_the_right_is_revoked_before_the_pages_are_others() -> None:
    network, loan = lend_pages()
    network.recall("b", 1, 100)
    network.messages.clear()
    network.begin_reading("a", loan)
    network.read("a", 1)
    actions = network.lending("b").tick(100)
    assert isinstance(actions[0], Revoke)
    network.act(network.instances["b"], actions)
    assert not used(network.instances["b"])
    network.read("a", 99)
    assert network.num_gone_reads == 1
    network.run()
    assert network.user("a").lost == {loan: "it was recalled"}
    over(network)


def test_a_debtor_hears_of_a_recall_whatever_gets_lost() -> None:
    network, loan = lend_pages()
    network.recall("b", 1, 3 * FIRST_TICKS)
    network.messages.clear()
    network.pass_time(FIRST_TICKS)
    network.run()
    assert network.user("a").recalled == {loan: 3 * FIRST_TICKS}
    network.pass_time(2 * FIRST_TICKS)
    assert network.user("a").lost == {loan: "it was recalled"}
    network.messages.clear()
    network.pass_time(FIRST_TICKS)
    over(network)


def test_a_debtor_hears_that_its_pages_were_taken_whatever_gets_lost() -> None:
    network, loan = lend_pages()
    network.recall("b", 1, 0)
    assert not used(network.instances["b"]) and len(network.lending("b")) == 1
    assert not network.lending("b").lends
    network.messages.clear()
    network.pass_time(FIRST_TICKS)
    network.run()
    assert network.user("a").lost == {loan: "it was recalled"}
    over(network)


def test_a_recall_that_is_heard_before_the_loan_is_filled_ends_it() -> None:
    network, loan = begin_filling()
    network.copy("b", 0, 99)
    network.recall("b", 1, 50)
    network.deliver(1)
    assert network.user("a").lost == {loan: "it was recalled"}
    over(network)


def test_what_was_never_filled_goes_first_and_at_once_then_the_youngest() -> None:
    network = quiet("full", 40)
    oldest, youngest = network.lend("a", "b", 5), network.lend("c", "b", 5)
    granted = network.borrow("a", "b", 5, 10_000)
    network.run()
    network.recall("b", 3, 100)
    network.run()
    assert network.user("a").lost == {granted: "it was recalled"}
    assert network.pages_lent("b") == {"a": (5,), "c": (5,)}
    network.recall("b", 3, 100)
    network.run()
    assert network.user("c").recalled.keys() == {youngest} and not network.user("a").recalled
    network.recall("b", 3, 100)
    network.run()
    assert not network.user("a").recalled, "enough is on its way back"
    network.recall("b", 6, 100)
    network.run()
    assert network.user("a").recalled.keys() == {oldest}


def test_a_recall_takes_loans_only_of_the_groups_in_which_pages_are_missing() -> None:
    network = quiet("two", 40)
    creditor = network.instances["b"]
    for number, counts in enumerate([[0, 2], [2, 0]], 1):
        borrow = borrow_of(network, number=number, counts=ints(counts).tobytes())
        network.act(creditor, hear(network, "b", "a", borrow))
    assert network.lending("b").recall([0, 0], network.now, 10) == []
    network.act(creditor, network.lending("b").recall([0, 1], network.now, 10))
    assert network.pages_lent("b") == {"a": (2, 0)}, "the older one has what is missing"


def test_a_pull_under_way_is_stopped_by_a_recall() -> None:
    network, loan = begin_filling()
    creditor = network.instances["b"]
    network.copy("b", 0, 1)
    actions = network.lending("b").recall(network.counts(1), network.now, 10)
    assert isinstance(actions[0], StopPull) and used(creditor)
    assert network.lending("b").recall(network.counts(1), network.now, 10) == [], "it comes back"
    network.act(creditor, actions)
    over(network)
    assert network.user("a").lost == {loan: "it was recalled"}


def test_a_pull_that_was_whole_when_it_was_stopped_is_no_loan() -> None:
    network, _ = begin_filling()
    creditor = network.instances["b"]
    (transfer,) = creditor.copying
    network.recall("b", 1, 10)
    del creditor.copying[transfer]
    network.act(creditor, creditor.agent.handle(PullEnded(transfer, "")))
    assert not used(creditor) and not creditor.granted
    over(network)


def test_a_recall_may_become_sooner_and_never_later() -> None:
    network, loan = lend_pages()
    lending = network.lending("b")
    for ticks, deadline in (100, 100), (500, 100), (50, 50):
        network.act(network.instances["b"], lending.recall_all(network.now, ticks))
        network.run()
        assert network.user("a").recalled == {loan: deadline}


def test_a_creditor_that_drains_recalls_all_and_lends_nothing_more() -> None:
    network, loan = lend_pages()
    network.drain("b")
    network.run()
    assert network.user("a").recalled == {loan: network.now + DRAIN_TICKS}
    other = network.lend("c", "b")
    assert network.user("c").refused == {other: "the instance is draining"}
    assert network.instances["b"].agent.handle(Draining()) == [], "it drains already"
    network.pass_time(DRAIN_TICKS)
    over(network)


def test_a_debtor_that_drains_borrows_nothing_more_and_reads_what_stands() -> None:
    network, loan = lend_pages()
    network.drain("a")
    refused = network.borrow("a", "b", 1, 10)
    assert network.user("a").refused == {refused: "the instance is draining"}
    assert network.believed() == 1
    network.give_back("a", loan)
    over(network)


@pytest.mark.parametrize("state", ["asked", "granted", "filling", "lent", "recalled", "returning"])
@pytest.mark.parametrize("dies", ["a", "b"])
def test_a_death_on_either_side_ends_a_loan_in_any_state(state: str, dies: str) -> None:
    network = quiet()
    if state in ("lent", "recalled", "returning"):
        loan = network.lend("a", "b")
    else:
        loan = network.borrow("a", "b", 2, 100)
    if state in ("granted", "filling"):
        network.run()
    if state == "filling":
        network.fill("a", loan)
        network.deliver(0)
        network.copy("b", 0, 1)
    if state == "recalled":
        network.recall("b", 1, 100)
        network.run()
    user = network.user("a")
    if state == "returning":
        network.give_back("a", loan)
    network.crash(dies)
    over(network)
    if dies == "b":
        told = user.refused if state == "asked" else user.lost
        assert told == ({} if state == "returning" else {loan: "b died"})


def test_pages_that_are_being_filled_stay_held_when_the_debtor_dies() -> None:
    network, _ = begin_filling()
    creditor = network.instances["b"]
    died = network.instances["a"].incarnation
    network.act(creditor, creditor.agent.handle(PeerLost("a", died)))
    assert used(creditor) and lent_pages(network.lending("b"))
    network.copy("b", 0, 99)
    assert not used(creditor)


def test_the_death_of_an_earlier_incarnation_ends_nothing_of_a_later_one() -> None:
    network = quiet()
    network.crash("a")
    network.crash("b")
    network.lend("a", "b")
    for name, peer in ("a", "b"), ("b", "a"):
        instance = network.instances[name]
        earlier = network.instances[peer].incarnation - 1
        network.act(instance, instance.agent.handle(PeerLost(peer, earlier)))
    assert network.believed() == 1


def test_an_instance_that_cannot_be_reached_ends_its_loans() -> None:
    network, loan = lend_pages()
    debtor = network.instances["a"]
    network.act(debtor, debtor.agent.handle(PeerLost("b", 0)))
    assert network.user("a").lost == {loan: "b died"}
    network.recall("b", 1, 100)  # the creditor, which has not heard of it, finds out so
    over(network)


def test_a_broken_connection_ends_loans_on_both_sides() -> None:
    network, loan = lend_pages()
    network.hang_up("a", "b")
    assert network.user("a").lost == {loan: "b died"}
    over(network)


def test_the_audit_says_what_does_not_fit_together() -> None:
    network = quiet("full")
    network.lend("a", "b")
    creditor, debtor = network.instances["b"].agent, network.instances["a"].agent
    assert audit_loans(creditor) == audit_loans(debtor) == []
    (one,) = lent_of(creditor.lending).values()
    one.state = "revoked"
    assert len(audit_loans(creditor)) == 2
    one.state = "filling"
    assert len(audit_loans(creditor)) == 1
    one.state, rows = "lent", one.rows
    one.rows = rows[:1]
    assert "and holds" in audit_loans(creditor)[0]
    one.rows = rows
    creditor.lending.most_lent = (1,)
    assert "more than" in audit_loans(creditor)[0]
    lent_of(creditor.lending).clear()
    assert "holds pages for no loan" in audit_loans(creditor)[0]
    (mine,) = debtor.borrowing.open.values()
    mine.deadline, mine.state = None, "granted"
    assert "waits for nothing" in audit_loans(debtor)[-1]
    assert "readable or lent, not both" in audit_loans(debtor)[0]
    mine.state = "asked"
    assert "is asked with pages" in audit_loans(debtor)[1]


def test_an_audit_finds_who_borrows_and_lends_at_once() -> None:
    network = quiet("full")
    network.lend("a", "b")
    agent = network.instances["b"].agent
    agent.borrowing.lends = lambda: False
    agent.borrowing.borrow("c", [1], 0, 10)
    assert audit_loans(agent) == ["the instance borrows and lends at the same time"]


def test_actions_grant_nothing_but_the_pages_of_the_loan() -> None:
    network = quiet("full")
    loan = network.borrow("a", "b", 2, 100)
    network.run()
    grant, said = network.borrowing("a").fill(loan, [5, 3])
    assert isinstance(grant, Grant) and grant.receiver == "b"
    assert grant.pages == ints([0, 5, 0, 3]).tobytes()
    assert isinstance(said, Send) and isinstance(said.message, Fill)
    assert said.message.pages == ints([5, 3]).tobytes()
    assert said.message.number == grant.transfer.number
