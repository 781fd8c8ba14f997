"""Instances that lend each other memory, over a network that a test moves step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvell.memory import GroupKind
from kvell.mempool.entries import Draining, PeerLost, PullEnded, Ticked
from kvell.mempool.loans.actions import (
    Counts,
    LoanFilled,
    LoanGranted,
    LoanLost,
    LoanNews,
    LoanRecalled,
    LoanRefused,
)
from kvell.mempool.loans.creditor_ledger import CreditorLedger
from kvell.mempool.loans.debtor_ledger import Debt, DebtorLedger
from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Owner
from kvell.mempool.transfers.actions import Action, Grant
from kvell.mempool.transfers.messages import Transfer
from kvell.pages.layout import GroupSpec
from tests.mempool.agent_audit import audit_loans, lent_pages
from tests.mempool.seen import lent_of
from tests.mempool.transfers.network import Instance, Label, Network, ints
from tests.mempool.transfers.runs import MIXES
from tests.pages.pools import group

LENDING_MIXES: dict[str, list[GroupSpec]] = {
    **MIXES,
    "two": [group(4, 2), group(2, 3)],
}
FREED: Label = (-1,)
"""What is in a page as soon as it is not somebody's any more: others write there."""


def content_of(loan: Loan, group_index: int, index: int) -> Label:
    return (loan.incarnation, loan.number, group_index, index, 1 << 25)


@dataclass
class Reading:
    """A debtor reads a loan in place, page after page, and may take its time.

    :ivar left: (group, index, page of the creditor) still to be read.
    """

    loan: Loan
    standing: Debt
    left: list[tuple[int, int, int]]
    is_right: bool = True


@dataclass
class User:
    """Who borrows at one incarnation: what it was told, and pages from which it fills loans."""

    asked: dict[Loan, tuple[int, ...]] = field(default_factory=dict)
    granted: list[Loan] = field(default_factory=list)
    sources: dict[Loan, Owner] = field(default_factory=dict)
    filled: list[Loan] = field(default_factory=list)
    refused: dict[Loan, str] = field(default_factory=dict)
    lost: dict[Loan, str] = field(default_factory=dict)
    recalled: dict[Loan, int] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)

    def forget(self, loan: Loan) -> None:
        for some in (self.granted, self.filled):
            if loan in some:
                some.remove(loan)


class LoanNetwork(Network):
    """Instances that lend, whose pages are overwritten as soon as they are others'."""

    def __init__(self, mix: str, large: int) -> None:
        super().__init__(LENDING_MIXES[mix], large)
        self.users: dict[tuple[str, int], User] = {}
        self.granted_pages: dict[Transfer, set[tuple[int, int]]] = {}
        self.lent: dict[tuple[str, int], set[tuple[int, int]]] = {}
        self.roots: dict[Loan, Loan] = {}
        """Loans that share, and whose pages they have."""
        self.step_ticks = 0
        """How long debtors say that their steps take."""
        self.paused: dict[str, list[PeerLost]] = {}
        """Instances that stand still, and what they have not heard of meanwhile."""
        self.num_right_reads = self.num_gone_reads = 0

    def user(self, name: str) -> User:
        return self.users[name, self.instances[name].incarnation]

    def borrowing(self, name: str) -> DebtorLedger:
        return self.instances[name].agent.borrowing

    def lending(self, name: str) -> CreditorLedger:
        return self.instances[name].agent.lending

    def pages_lent(self, name: str) -> dict[str, Counts]:
        """Pages of each group that each debtor has of an instance."""
        lending = self.lending(name)
        lent = {loan: entry for loan, entry in lent_of(lending).items() if entry.has_pages}
        return {
            debtor: lending.sum_of(entry for loan, entry in lent.items() if loan.debtor == debtor)
            for debtor in sorted({loan.debtor for loan in lent})
        }

    def start(self, name: str) -> None:
        super().start(name)
        self.paused.pop(name, None)
        self.users[name, self.instances[name].incarnation] = User()

    def crash(self, name: str) -> None:
        """An instance dies and starts again; those that stand still hear of it later."""
        died = PeerLost(name, self.instances[name].incarnation)
        self.start(name)
        for other in self.instances:
            if other != name:
                self.lose(other, died)

    def hang_up(self, one: str, other: str) -> None:
        lost = [PeerLost(name, self.instances[name].incarnation) for name in (one, other)]
        self.lose(other, lost[0])
        self.lose(one, lost[1])

    def lose(self, name: str, lost: PeerLost) -> None:
        if name in self.paused:
            self.paused[name].append(lost)
        else:
            instance = self.instances[name]
            self.act(instance, instance.agent.handle(lost))

    def pause(self, name: str) -> None:
        self.paused.setdefault(name, [])

    def resume(self, name: str) -> None:
        instance = self.instances[name]
        for lost in self.paused.pop(name, []):
            self.act(instance, instance.agent.handle(lost))
        self.act(instance, instance.agent.handle(Ticked(self.now)))

    def pass_time(self, ticks: int) -> None:
        self.now += ticks
        for name, instance in self.instances.items():
            if name not in self.paused:
                self.act(instance, instance.agent.handle(Ticked(self.now)))

    def deliver(self, index: int, *, keeps: bool = False, loses: bool = False) -> None:
        if self.messages[index % len(self.messages)][2] not in self.paused:
            super().deliver(index, keeps=keeps, loses=loses)

    def copy(self, name: str, index: int, count: int) -> None:
        if name not in self.paused:
            super().copy(name, index, count)

    def fail(self, name: str, index: int) -> None:
        instance = self.instances[name]
        if instance.copying and name not in self.paused:
            transfer = sorted(instance.copying)[index % len(instance.copying)]
            del instance.copying[transfer]
            self.act(instance, instance.agent.handle(PullEnded(transfer, "copying failed")))

    def drain(self, name: str) -> None:
        instance = self.instances[name]
        self.act(instance, instance.agent.handle(Draining()))

    def act(self, instance: Instance, actions: Sequence[Action]) -> None:
        """Do what is asked for, in order; then pages that are lent no more are others'."""
        for action in actions:
            if isinstance(action, LoanNews):
                self.hear(instance, action)
                continue
            if isinstance(action, Grant):
                pairs = np.frombuffer(action.pages, "<i4").reshape(-1, 2).tolist()
                self.granted_pages[action.transfer] = {(g, page) for g, page in pairs}
            super().act(instance, [action])
        key = instance.name, instance.incarnation
        lent = lent_pages(instance.agent.lending)
        for group_index, page in self.lent.get(key, set()) - lent:
            instance.write(group_index, page, FREED)
        self.lent[key] = lent
        self.check(instance)

    def hear(self, instance: Instance, news: LoanNews) -> None:
        user = self.users[instance.name, instance.incarnation]
        loan = news.loan
        if isinstance(news, LoanGranted):
            assert loan in user.asked and loan not in user.granted
            user.granted.append(loan)
        elif isinstance(news, LoanFilled):
            if loan not in self.roots:
                user.granted.remove(loan)
            user.filled.append(loan)
            self.let_go(instance, user, loan)
        elif isinstance(news, LoanRecalled):
            assert loan in user.filled
            user.recalled[loan] = news.deadline
        elif isinstance(news, LoanRefused):
            assert loan not in user.granted and loan not in user.refused
            user.refused[loan] = news.why
        else:
            assert isinstance(news, LoanLost) and loan not in user.lost
            user.lost[loan] = news.why
            user.forget(loan)
            self.let_go(instance, user, loan)

    def let_go(self, instance: Instance, user: User, loan: Loan) -> None:
        owner = user.sources.pop(loan, None)
        if owner is not None:
            for group_index, _, page in instance.holds.pages(owner).tolist():
                instance.write(group_index, page, FREED)
            instance.holds.release(owner)

    def counts(self, size: int) -> list[int]:
        """Pages of a loan: so many of the first group with full attention, one more of the next."""
        full = [one.kind is GroupKind.FULL for one in self.groups]
        return [size + sum(full[:index]) if is_full else 0 for index, is_full in enumerate(full)]

    def borrow(self, debtor: str, creditor: str, size: int, ticks: int) -> Loan:
        counts = self.counts(size)
        loan, actions = self.borrowing(debtor).borrow(creditor, counts, self.now, ticks)
        self.user(debtor).asked[loan] = tuple(counts)
        self.act(self.instances[debtor], actions)
        return loan

    def share(self, debtor: str, other: Loan, ticks: int) -> Loan:
        """Ask once more for the pages of a loan that stands."""
        loan, actions = self.borrowing(debtor).share(
            other, self.now, ticks, step_ticks=self.step_ticks
        )
        self.roots[loan] = self.roots.get(other, other)
        self.user(debtor).asked[loan] = self.user(debtor).asked[other]
        self.act(self.instances[debtor], actions)
        return loan

    def fill(self, debtor: str, loan: Loan) -> bool:
        instance, user = self.instances[debtor], self.user(debtor)
        owner = instance.owner("alloc")
        if instance.holds.hold_pages(owner, 1 << 60, ints(user.asked[loan])) is None:
            return False
        pages = []
        for (group_index, index), page in sorted(instance.holds.places(owner).items()):
            instance.write(group_index, page, content_of(loan, group_index, index))
            pages.append(page)
        user.sources[loan] = owner
        filled = self.borrowing(debtor).fill(loan, pages, step_ticks=self.step_ticks)
        self.act(instance, filled)
        return True

    def give_back(self, debtor: str, loan: Loan) -> None:
        instance, user = self.instances[debtor], self.user(debtor)
        self.act(instance, self.borrowing(debtor).give_back(loan))
        user.forget(loan)
        self.let_go(instance, user, loan)

    def recall(self, creditor: str, size: int, ticks: int) -> None:
        actions = self.lending(creditor).recall(self.counts(size), self.now, ticks)
        self.act(self.instances[creditor], actions)

    def lend(self, debtor: str, creditor: str, size: int = 2, most_copied: int = 99) -> Loan:
        """Borrow and fill, with nothing lost.

        :param most_copied: pages that are pulled; with fewer than all the pull is still under way.
        """
        waiting = len(self.messages)
        loan = self.borrow(debtor, creditor, size, 600_000)
        self.hasten(waiting)
        if loan in self.user(debtor).granted and self.fill(debtor, loan):
            self.hasten(waiting)
            copying = sorted(self.instances[creditor].copying)
            mine = [at for at, one in enumerate(copying) if one.sender == debtor]
            self.copy(creditor, mine[-1] if mine else 0, most_copied)
            self.hasten(waiting)
        return loan

    def hasten(self, waiting: int) -> None:
        """Deliver what was said last, unless it is for one that stands still."""
        while len(self.messages) > waiting and self.messages[-1][2] not in self.paused:
            self.deliver(len(self.messages) - 1)

    def begin_reading(self, debtor: str, loan: Loan) -> None:
        standing = self.borrowing(debtor).readable[loan]
        left = [
            (group_index, index, page)
            for group_index, pages in enumerate(standing.pages)
            for index, page in enumerate(pages)
        ]
        self.user(debtor).readings.append(Reading(loan, standing, left))

    def read(self, debtor: str, count: int) -> None:
        """Read on; behind the last page, what was read counts if the right stands."""
        readings = self.user(debtor).readings
        if not readings or debtor in self.paused:
            return
        reading = readings[0]
        standing = reading.standing
        creditor = self.instances[standing.peer]
        is_there = creditor.incarnation == standing.incarnation
        for group_index, index, page in reading.left[:count]:
            found = creditor.content.get((group_index, page)) if is_there else None
            root = self.roots.get(reading.loan, reading.loan)
            reading.is_right &= found == content_of(root, group_index, index)
        del reading.left[:count]
        if reading.left:
            return
        readings.pop(0)
        right = Transfer(standing.peer, standing.incarnation, standing.right)
        if is_there and right in creditor.granted:
            assert reading.is_right, f"{reading.loan} was read, and others had written there"
            self.num_right_reads += 1
        else:
            self.num_gone_reads += 1

    def check(self, instance: Instance) -> None:
        """Nobody may read, and nothing is written, where a page is others'."""
        loans = instance.agent
        assert audit_loans(instance.agent) == []
        lent = lent_pages(loans.lending)
        for transfer, copying in instance.copying.items():
            if transfer in loans.lending.pulls:
                rows = copying.pull.rows.tolist()
                assert {(g, own) for g, _, own in rows} <= lent, "others have what is written"
        user = self.users[instance.name, instance.incarnation]
        sources = {
            (g, page)
            for owner in user.sources.values()
            for g, _, page in instance.holds.pages(owner).tolist()
        }
        for transfer in instance.granted:
            if transfer in instance.sending:
                continue
            pages = self.granted_pages[transfer]
            assert pages <= lent or pages <= sources, f"{transfer} may read what is others'"

    def believed(self) -> int:
        """Every loan that a debtor believes readable is; returns how many there are."""
        total = 0
        for name in self.instances:
            for loan, standing in self.borrowing(name).readable.items():
                right = Transfer(standing.peer, standing.incarnation, standing.right)
                assert right in self.instances[standing.peer].granted, loan
                self.user(name).readings.clear()
                self.begin_reading(name, loan)
                self.read(name, 1 << 30)
                total += 1
        return total

    def run(self) -> None:
        """Deliver and copy until nothing is under way."""
        for _ in range(5_000):
            if self.messages:
                self.deliver(0)
            for name in self.instances:
                self.copy(name, 0, 99)
                self.write(name, 0)
            if not self.messages and not any(one.copying for one in self.instances.values()):
                return
        raise AssertionError("the network does not come to rest")

    def settle(self) -> None:
        """The network heals, and all deadlines pass; loans that are read stand."""
        for name in self.instances:
            self.resume(name)
        self.run()
        for _ in range(4):
            self.pass_time(1 << 40)
            self.run()
