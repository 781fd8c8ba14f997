"""Peers that know the secret and say anything: no message ends an agent, or spoils its memory."""

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvell.memory import audit
from kvell.mempool.entries import Heard, PeerMapped, PullEnded, Ticked
from kvell.mempool.loans.actions import LoanGranted
from kvell.mempool.loans.creditor_ledger import most_lendable
from kvell.mempool.loans.messages import Loan
from kvell.mempool.transfers.actions import Action, Ended, Pull, Send
from kvell.mempool.transfers.messages import PeerMessage, Transfer
from kvell.wire.decoding import MalformedError, decode
from tests.depth import machine
from tests.mempool.agent_audit import audit_holds, audit_loans
from tests.mempool.loans.lenders import LENDING_MIXES
from tests.mempool.transfers.network import Instance, ints
from tests.wire.any_message import NAMES, PLAIN, any_of, packed

DECODER = msgspec.msgpack.Decoder(PeerMessage)
TEXT = [0, *range(10, 30)]
small = st.integers(0, 3)
KNOWN = {
    **PLAIN,
    str: st.sampled_from((*NAMES, "b", "b")),
    int: PLAIN[int] | small,
    bytes: PLAIN[bytes] | st.lists(small, max_size=4).map(packed),
    Transfer: st.builds(Transfer, st.sampled_from("ab"), small, small),
    Loan: st.builds(Loan, st.sampled_from("ab"), small, small),
}
messages = any_of(PeerMessage, KNOWN)


class AnyMessage(RuleBasedStateMachine):
    """Two agents; of what they say a field or all of it may be anything."""

    @initialize(mix=st.sampled_from(sorted(LENDING_MIXES)), maps=st.booleans())
    def start(self, mix: str, maps: bool) -> None:
        self.now, self.under_way = 0, list[tuple[str, PeerMessage]]()
        self.pulls: list[tuple[str, Transfer]] = []
        self.borrowed: dict[Loan, int] = {}
        self.both = {
            name: Instance(name, number, LENDING_MIXES[mix], 12)
            for number, name in enumerate("ab", start=1)
        }
        for name, one in self.both.items():
            one.compute(TEXT)
            if maps:
                other = self.both[self.other(name)]
                self.act(name, one.agent.handle(PeerMapped(other.name, other.incarnation, 64)))

    def other(self, name: str) -> str:
        return "ab".replace(name, "")

    def act(self, name: str, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.under_way.append((name, action.message))
            elif isinstance(action, Pull):
                self.pulls.append((name, action.transfer))
            elif isinstance(action, Ended) and action.transfer in self.both[name].owners:
                one = self.both[name]
                one.holds.release(one.owners.pop(action.transfer))
            elif isinstance(action, LoanGranted):
                borrowing = self.both[name].agent.borrowing
                self.act(name, borrowing.fill(action.loan, range(self.borrowed[action.loan])))

    def hear(self, sender: str, message: PeerMessage) -> None:
        """What passes the decoder is handed over."""
        try:
            heard = decode(DECODER, msgspec.msgpack.encode(message))
        except (MalformedError, OverflowError):
            return
        to = self.other(sender)
        self.act(to, self.both[to].agent.handle(Heard(sender, heard)))

    @rule(name=st.sampled_from("ab"), message=messages)
    def says_anything(self, name: str, message: PeerMessage) -> None:
        self.hear(name, message)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def garble(self, data: st.DataObject) -> None:
        """A message arrives with something else in one of its fields."""
        sender, message = self.under_way.pop()
        name = data.draw(st.sampled_from(message.__struct_fields__))
        value = data.draw(any_of(type(getattr(message, name)), KNOWN))
        self.hear(sender, msgspec.structs.replace(message, **{name: value}))

    @rule(left=st.integers(0, 2))
    def deliver(self, left: int) -> None:
        while len(self.under_way) > left:
            self.hear(*self.under_way.pop(0))

    @rule(name=st.sampled_from("ab"), count=st.integers(1, len(TEXT)), inserts=st.booleans())
    def copy(self, name: str, count: int, inserts: bool) -> None:
        text = ints([*TEXT[:count], 7])
        copies = self.both[name].agent.copies
        _, actions = copies.begin(self.other(name), text, self.now, self.now + 900, inserts=inserts)
        self.act(name, actions)

    @rule(name=st.sampled_from("ab"))
    def ask(self, name: str) -> None:
        asking = self.both[name].agent.asking
        self.act(name, asking.ask(self.other(name), ints(TEXT), self.now, self.now + 900)[1])

    @rule()
    def borrow(self) -> None:
        """Always the same: who lends does not borrow."""
        name, one = "a", self.both["a"]
        layout = one.core.layout
        counts = [min(1, most) for most in most_lendable(layout.groups, layout.num_large_pages)]
        if any(counts):
            borrowing = one.agent.borrowing
            loan, actions = borrowing.borrow(self.other(name), counts, self.now, self.now + 900)
            self.borrowed[loan] = sum(counts)
            self.act(name, actions)

    @precondition(lambda self: self.pulls)
    @rule(problem=st.sampled_from(["", "it failed"]))
    def pull(self, problem: str) -> None:
        name, transfer = self.pulls.pop()
        self.act(name, self.both[name].agent.handle(PullEnded(transfer, problem)))

    @rule(ticks=st.integers(1, 60))
    def pass_time(self, ticks: int) -> None:
        self.now += ticks
        for name, one in self.both.items():
            self.act(name, one.agent.handle(Ticked(self.now)))

    @invariant()
    def memory_is_sound(self) -> None:
        for one in getattr(self, "both", {}).values():
            assert audit(one.core.layout, one.core.snapshot()) == []
            assert audit_holds(one.holds, one.core) == []
            assert audit_loans(one.agent) == []


TestAnyMessage = AnyMessage.TestCase
TestAnyMessage.settings = machine()
