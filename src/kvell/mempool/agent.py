"""One instance's part in the pool, without I/O: events in, actions out.

The scheduler's process, the library and the simulator run the same agent.
"""

import hashlib
import json
from collections.abc import Collection, Sequence, Sized

from kvell.elastic.page_buffer import PageBuffer
from kvell.memory import GroupSpec, HoldingCore
from kvell.mempool.entries import (
    BY_QUERIES,
    NOT_IN_PLACE,
    Draining,
    Heard,
    PeerEntry,
    PeerLost,
    PeerMapped,
    PullEnded,
)
from kvell.mempool.holds import Hold, Holds
from kvell.mempool.loans.creditor_ledger import DRAIN_TICKS, CreditorLedger, most_lendable
from kvell.mempool.loans.debtor_ledger import DebtorLedger
from kvell.mempool.loans.messages import (
    Borrow,
    Fill,
    Filled,
    GiveBack,
    GivenBack,
    Lent,
    LoanMessage,
    Recall,
)
from kvell.mempool.owners import Tick
from kvell.mempool.tiers.buffered import BufferedPages
from kvell.mempool.tiers.received import ReceivedTexts
from kvell.mempool.tiers.sent import SentTexts
from kvell.mempool.transfers.actions import Action, Arrived, Ended, Send
from kvell.mempool.transfers.asking import Asking
from kvell.mempool.transfers.copies import Copies
from kvell.mempool.transfers.messages import (
    Abandon,
    Ask,
    Declined,
    Offer,
    PeerMessage,
    Prepare,
    Prepared,
    Pulled,
    Written,
)
from kvell.mempool.transfers.numbers import RightNumbers
from kvell.mempool.transfers.receiving import Receiving
from kvell.mempool.transfers.sending import Sending


def layout_fingerprint(groups: Sequence[GroupSpec], content: str) -> str:
    """Return a digest of the format of pages; instances with equal digests may exchange pages.

    The digest is independent of the size of the pool and the number of pages in a large page.

    :param content: what else decides the bytes of a page: weights, element types.
    """
    fields = [
        [
            group.name,
            group.kind.value,
            list(group.layers),
            group.layer_token_bytes,
            group.page_tokens,
            group.page_stride_bytes,
            group.window_tokens,
            group.layers_per_page,
            group.model,
        ]
        for group in groups
    ]
    return hashlib.blake2b(json.dumps([fields, content]).encode(), digest_size=16).hexdigest()


class Agent:
    """The holds, and both sides of transfers and of loans, over one memory core.

    :param content: what besides the layout decides the bytes of a page (weights, element types).
    :param most_transfers: the most concurrent incoming transfers; further ones are refused.
    :param most_lent: the most pages of each group to lend; None: 31/32 of those with full
        attention.
    """

    def __init__(
        self,
        core: HoldingCore,
        instance: str,
        incarnation: int,
        content: str,
        most_transfers: int = 256,
        most_lent: Sequence[int] | None = None,
    ) -> None:
        self.core, self.instance, self.incarnation = core, instance, incarnation
        self.fingerprint = layout_fingerprint(core.layout.groups, content)
        self.now: Tick = 0
        self.neighbours: dict[tuple[str, int], int] = {}
        """By peer and incarnation: the large page at which the peer's mapped pool begins."""
        self.answering: set[tuple[str, int]] = set()
        """The peers that compute attention over lent pages, for query rows."""
        self.asked_models: Collection[str] | None = None
        """The models whose attention these peers compute; None: all."""
        self.out_of_reach: set[str] = set()
        """The instances whose pages can only be copied."""
        self.holds = Holds(core)
        self.numbers = numbers = RightNumbers()
        self.sending = Sending(instance, incarnation, self.fingerprint, self._most_pages(), numbers)
        self.receiving = Receiving(self.fingerprint, self.holds, most_transfers)
        self.copies = Copies(instance, incarnation, self.holds, self.sending)
        self.asking = Asking(incarnation, self.fingerprint, self.copies)
        if most_lent is None:
            most_lent = most_lendable(core.layout.groups, core.layout.num_large_pages)
        self.borrowing = DebtorLedger(instance, incarnation, self.fingerprint, numbers)
        self.lending = CreditorLedger(
            instance, incarnation, self.fingerprint, self.holds, numbers, most_lent
        )
        self.borrowing.lends = lambda: self.lending.lends
        self.lending.borrows = lambda: len(self.borrowing) > 0
        self.lending.is_other_pull = self.receiving.__contains__
        sides = self.sending, self.receiving, self.asking, self.borrowing, self.lending
        self._parts = self.holds, *sides
        self.open: tuple[Sized, ...] = (self.holds, *(side.open for side in sides))
        """All that is in progress: without any of it, there is no deadline."""

    def read_buffer(
        self, buffer: PageBuffer, first_large: int, cached: BufferedPages | None
    ) -> None:
        """Send pages of the CPU buffer, which follows the pool in the same memory, and receive
        texts there that have no room in the pool.

        :param cached: the texts in it, if it has any.
        """
        self.sending.most_pages = tuple(self._most_pages(buffer.num_large))
        if cached is not None:
            self.copies.sent = SentTexts(self.core, self.holds, cached, first_large)
            self.receiving.buffered = ReceivedTexts(self.core, cached, first_large)

    def _most_pages(self, more_large: int = 0) -> list[int]:
        layout = self.core.layout
        count = layout.num_large_pages + more_large
        return [group.pages_per_large * count for group in layout.groups]

    @property
    def next_deadline(self) -> Tick | None:
        """The next time at which :class:`.Ticked` has an effect; None if there is none."""
        deadlines = [part.next_deadline for part in self._parts]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def handle(self, entry: PeerEntry) -> list[Action]:
        return self._followed(self._handled(entry))

    def _followed(self, actions: Sequence[Action]) -> list[Action]:
        """Return the actions with their consequences for copies and requests for texts.

        Pages of a finished copy are released here. The caller executes the actions before it
        allocates pages again.
        """
        followed: list[Action] = []
        for action in actions:
            followed.append(action)
            if isinstance(action, Ended):
                self.copies.on_ended(action.transfer)
                followed += self.asking.on_ended(action)
            elif isinstance(action, Arrived) and action.is_inserted:
                followed += self.asking.on_arrived(action)
        return followed

    def _handled(self, entry: PeerEntry) -> list[Action]:
        if isinstance(entry, Heard):
            return self._heard(entry.peer, entry.message)
        if isinstance(entry, PullEnded):
            part = self.lending if entry.transfer in self.lending.pulls else self.receiving
            return part.on_pulled(entry.transfer, entry.problem)
        if isinstance(entry, PeerLost):
            return self._instance_died(entry.peer, entry.incarnation)
        if isinstance(entry, Draining):
            self.receiving.is_closed = self.borrowing.is_closed = self.lending.is_closed = True
            return self.lending.recall_all(self.now, DRAIN_TICKS)
        if isinstance(entry, PeerMapped):
            if entry.first_large == NOT_IN_PLACE:
                self.out_of_reach.add(entry.peer)
            elif entry.first_large == BY_QUERIES:
                self.answering.add((entry.peer, entry.incarnation))
            else:
                self.neighbours[entry.peer, entry.incarnation] = entry.first_large
            return []
        now = self.now = entry.now
        actions = self.sending.tick(now) + self.receiving.tick(now) + self.asking.tick(now)
        actions += self.borrowing.tick(now) + self.lending.tick(now)
        self.holds.release_where(lambda hold: hold.deadline <= now)
        return actions

    def _heard(self, peer: str, message: PeerMessage) -> list[Action]:
        if isinstance(message, LoanMessage):
            return self._heard_of_loan(peer, message)
        if isinstance(message, Prepare):
            if message.transfer in self.lending.pulls:
                return [Send(peer, Abandon(message.transfer, "it fills a loan"))]
            return self.receiving.prepare(peer, message, self.now)
        if isinstance(message, Prepared):
            return self.sending.on_prepared(peer, message)
        if isinstance(message, Offer):
            return self.receiving.offer(peer, message)
        if isinstance(message, Pulled):
            return self.sending.on_pulled(peer, message)
        if isinstance(message, Ask):
            return self.asking.answer(peer, message, self.now)
        if isinstance(message, Declined):
            return self.asking.on_declined(peer, message)
        if isinstance(message, Written):
            return []  # ``PullExecutor`` handles it
        assert isinstance(message, Abandon)
        mine = self.sending.on_abandoned(peer, message)
        return mine + self.receiving.on_abandoned(peer, message)

    def _heard_of_loan(self, peer: str, message: LoanMessage) -> list[Action]:
        borrowing, lending = self.borrowing, self.lending
        if isinstance(message, Borrow):
            return lending.borrow(peer, message, self.now)
        if isinstance(message, Lent | Filled | Recall):
            return borrowing.hear(peer, message)
        if isinstance(message, Fill):
            return lending.fill(peer, message)
        if isinstance(message, GiveBack):
            return lending.given_back(peer, message)
        if isinstance(message, GivenBack):
            return borrowing.given_back(peer, message)
        return borrowing.on_over(peer, message) + lending.on_over(peer, message)

    def _instance_died(self, instance: str, incarnation: int) -> list[Action]:
        """End the transfers and loans of a dead instance, and release its holds here.

        Holds of its incoming transfers are released once no copy writes into them.
        """
        self.neighbours.pop((instance, incarnation), None)
        self.answering.discard((instance, incarnation))
        self.out_of_reach.discard(instance)
        actions = self.sending.instance_died(instance) + self.receiving.instance_died(instance)
        actions += self.asking.instance_died(instance)
        actions += self.borrowing.instance_died(instance, incarnation)
        actions += self.lending.instance_died(instance, incarnation)
        coming = {transfer.owner for transfer in self.receiving.open.values()}

        def is_over(hold: Hold) -> bool:
            owner = hold.owner
            is_its = owner.instance == instance and owner.incarnation <= incarnation
            return is_its and owner not in coming and owner.kind != "loan"

        self.holds.release_where(is_over)
        return actions
