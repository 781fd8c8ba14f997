"""Loans under drawn schedules: whatever is lost, late, doubled, stands still or dies, and when."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvell.mempool.exchanges import FIRST_TICKS
from kvell.mempool.loans.messages import Loan
from tests.depth import machine
from tests.mempool.loans.lenders import LENDING_MIXES, LoanNetwork

names = st.sampled_from("abc")
pairs = st.sampled_from(["ab", "ab", "ac", "ac", "ab", "ac", "cb", "ba", "bc", "ca"])
"""Who asks whom: mostly one instance asks the others, as more who ask refuse each other."""
seldom = st.sampled_from([False] * 9 + [True])
texts = st.builds(
    lambda start, count: [start, *range(10, 10 + count)], st.integers(0, 2), st.integers(1, 20)
)
sizes = st.sampled_from([1, 1, 2, 3, 9])
times = st.sampled_from([1, 10, 30, 30, 9_000])


class LoansMachine(RuleBasedStateMachine):
    """What is read and counts is right, nothing leaks, whatever happens."""

    @initialize(mix=st.sampled_from(list(LENDING_MIXES)), large=st.integers(6, 30))
    def start(self, mix: str, large: int) -> None:
        self.network = LoanNetwork(mix, large)
        for name in "abc":
            self.network.start(name)

    @rule(ways=pairs, size=sizes, ticks=times)
    def borrow(self, ways: str, size: int, ticks: int) -> None:
        if ways[0] not in self.network.paused:
            self.network.borrow(ways[0], ways[1], size, ticks)

    @rule(ways=pairs, size=sizes, most_copied=st.sampled_from([99, 99, 99, 0, 1]))
    def lend(self, ways: str, size: int, most_copied: int) -> None:
        """The same until the loan is filled or read, with nothing lost."""
        if ways[0] not in self.network.paused:
            self.network.lend(ways[0], ways[1], size, most_copied)

    @precondition(lambda self: self.readable())
    @rule(index=st.integers(0, 3), ticks=times, hastens=st.booleans())
    def share(self, index: int, ticks: int, hastens: bool) -> None:
        """The pages of a loan once more, perhaps with nothing lost."""
        name, loan = self.readable()[index % len(self.readable())]
        waiting = len(self.network.messages)
        if name not in self.network.paused:
            self.network.share(name, loan, ticks)
            if hastens:
                self.network.hasten(waiting)

    @rule(name=names, index=st.integers(0, 3))
    def fill(self, name: str, index: int) -> None:
        granted = [
            loan
            for loan in self.network.user(name).granted
            if loan not in self.network.user(name).sources
        ]
        if granted and name not in self.network.paused:
            self.network.fill(name, granted[index % len(granted)])

    @rule(name=names, index=st.integers(0, 3), loses=st.booleans())
    def give_back(self, name: str, index: int, loses: bool) -> None:
        user, waiting = self.network.user(name), len(self.network.messages)
        loans = [*user.filled, *user.granted, *user.sources] or [*user.asked]
        if loans and name not in self.network.paused:
            self.network.give_back(name, loans[-1 - index % len(loans)])
            del self.network.messages[waiting if loses else len(self.network.messages) :]

    @precondition(lambda self: self.lenders())
    @rule(
        index=st.integers(0, 2),
        size=sizes,
        ticks=st.sampled_from([0, 1, 3, 10, 9_000]),
        loses=st.booleans(),
    )
    def recall(self, index: int, size: int, ticks: int, loses: bool) -> None:
        lenders, waiting = self.lenders(), len(self.network.messages)
        self.network.recall(lenders[index % len(lenders)], size, ticks)
        del self.network.messages[waiting if loses else len(self.network.messages) :]

    @rule(name=st.sampled_from("ccb"), is_drawn=seldom)
    def drain(self, name: str, is_drawn: bool) -> None:
        if is_drawn and name not in self.network.paused:
            self.network.drain(name)

    @precondition(lambda self: self.readable())
    @rule(index=st.integers(0, 3), count=st.sampled_from([0, 1, 2, 99]))
    def begin_reading(self, index: int, count: int) -> None:
        name, loan = self.readable()[index % len(self.readable())]
        self.network.begin_reading(name, loan)
        self.network.read(name, count)

    @precondition(lambda self: any(self.network.user(name).readings for name in "abc"))
    @rule(count=st.integers(1, 9))
    def read(self, count: int) -> None:
        for name in "abc":
            self.network.read(name, count)

    @rule(name=names, text=texts)
    def compute(self, name: str, text: list[int]) -> None:
        self.network.instances[name].compute(text)

    @rule(ways=st.permutations("abc"), text=texts, ticks=times)
    def send(self, ways: list[str], text: list[int], ticks: int) -> None:
        """A text goes the way that transfers go, with numbers of the same rights."""
        if ways[0] not in self.network.paused:
            self.network.instances[ways[0]].compute(text)
            self.network.send(ways[0], ways[1], text, True, ticks)

    @precondition(lambda self: self.network.messages)
    @rule(
        index=st.sampled_from([0, 0, 0, 1, 2, 7, -1, -1]),
        fate=st.sampled_from(["", "", "", "", "", "keeps", "loses"]),
    )
    def deliver(self, index: int, fate: str) -> None:
        self.network.deliver(index, keeps=fate == "keeps", loses=fate == "loses")

    @precondition(lambda self: self.network.messages)
    @rule()
    def deliver_all(self) -> None:
        for _ in range(len(self.network.messages)):
            self.network.deliver(0)
            if not self.network.messages:
                break

    @precondition(lambda self: self.network.messages)
    @rule()
    def lose_all(self) -> None:
        self.network.messages.clear()

    @rule(name=names, index=st.integers(0, 5), count=st.integers(0, 9))
    def copy(self, name: str, index: int, count: int) -> None:
        self.network.copy(name, index, count)

    @rule(name=names, index=st.integers(0, 5))
    def fail(self, name: str, index: int) -> None:
        self.network.fail(name, index)

    @rule(ticks=st.sampled_from([0, 1, 3, 5, FIRST_TICKS]))
    def pass_time(self, ticks: int) -> None:
        self.network.pass_time(ticks)

    @rule(name=names, pauses=st.booleans())
    def pause(self, name: str, pauses: bool) -> None:
        if pauses:
            self.network.pause(name)
        elif name in self.network.paused:
            self.network.resume(name)

    @rule(name=names, is_drawn=seldom)
    def crash(self, name: str, is_drawn: bool) -> None:
        if is_drawn:
            self.network.crash(name)

    @rule(ways=pairs, is_drawn=seldom)
    def hang_up(self, ways: str, is_drawn: bool) -> None:
        if is_drawn:
            self.network.hang_up(ways[0], ways[1])

    def teardown(self) -> None:
        if not hasattr(self, "network"):
            return
        network = self.network
        network.settle()
        network.believed()
        for name, instance in network.instances.items():
            loans, user = instance.agent, network.user(name)
            standing = loans.borrowing.readable
            assert set(standing) == set(user.filled) and len(loans.borrowing) == len(standing)
            assert not user.granted and not user.sources
            stand = [loan for other in "abc" for loan in network.user(other).filled]
            creditors = [self.creditor(loan.debtor, loan) for loan in stand]
            assert len(loans.lending) == creditors.count(name)
        for name in network.instances:
            for loan in [*network.user(name).filled]:
                network.believed()  # those that share what others have given back
                network.give_back(name, loan)
        network.run()
        for instance in network.instances.values():
            assert not len(instance.agent.borrowing) and not len(instance.agent.lending)
            assert not len(instance.holds) and not instance.granted and not instance.copying
            assert not any(instance.core.snapshot().used)

    def lenders(self) -> list[str]:
        awake = [name for name in "abc" if name not in self.network.paused]
        return [name for name in awake if self.network.lending(name).lends]

    def readable(self) -> list[tuple[str, Loan]]:
        return [(name, one) for name in "abc" for one in self.network.borrowing(name).readable]

    def creditor(self, debtor: str, loan: Loan) -> str:
        return self.network.borrowing(debtor).readable[loan].peer


TestLoans = LoansMachine.TestCase
TestLoans.settings = machine(80, 0.6)
