"""One instance's part in the pool, without I/O: what happens comes in, what is to be done goes out.

The scheduler's process, the library and the simulator run the same agent.
"""

from kvell.memory import HoldingCore
from kvell.mempool.entries import Heard, PeerEntry, PeerLost, PullEnded
from kvell.mempool.holds import Holds
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transfers.fingerprint import layout_fingerprint
from kvell.mempool.transfers.messages import (
    Abandon,
    Offer,
    PeerMessage,
    Prepare,
    Prepared,
    Pulled,
    Transfer,
)
from kvell.mempool.transfers.receiving import Receiving
from kvell.mempool.transfers.sending import Sending


class Agent:
    """Holds, and both sides of transfers, over one memory core.

    :param content: what decides the bytes of a page beside the layout (weights, element types).
    :param most_transfers: that come at once; further ones are refused.
    """

    def __init__(
        self,
        core: HoldingCore,
        instance: str,
        incarnation: int,
        content: str,
        most_transfers: int = 256,
    ) -> None:
        self.instance, self.incarnation = instance, incarnation
        self.fingerprint = layout_fingerprint(core.layout.groups, content)
        self.now: Tick = 0
        self.holds = Holds(core)
        self.sending = Sending(instance, incarnation, self.fingerprint)
        self.receiving = Receiving(self.fingerprint, self.holds, most_transfers)

    @property
    def next_deadline(self) -> Tick | None:
        """When :meth:`tick` has something to do; None while nothing is held or under way."""
        parts = (self.holds, self.sending, self.receiving)
        found = [part.next_deadline for part in parts]
        return min((deadline for deadline in found if deadline is not None), default=None)

    def handle(self, entry: PeerEntry) -> list[Action]:
        """Something happened; time is what the last :class:`Ticked` said."""
        if isinstance(entry, Heard):
            return self.heard(entry.peer, entry.message, self.now)
        if isinstance(entry, PullEnded):
            return self.pulled(entry.transfer, entry.problem)
        if isinstance(entry, PeerLost):
            return self.instance_died(entry.peer, entry.incarnation)
        return self.tick(entry.now)

    def heard(self, peer: str, message: PeerMessage, now: Tick) -> list[Action]:
        """A message of another instance."""
        if isinstance(message, Prepare):
            return self.receiving.prepare(peer, message, now)
        if isinstance(message, Prepared):
            return self.sending.prepared(peer, message)
        if isinstance(message, Offer):
            return self.receiving.offer(peer, message)
        if isinstance(message, Pulled):
            return self.sending.pulled(peer, message)
        assert isinstance(message, Abandon)
        mine = self.sending.abandoned(peer, message)
        return mine + self.receiving.abandoned(peer, message)

    def pulled(self, transfer: Transfer, problem: str) -> list[Action]:
        """A copy has ended; see :meth:`.Receiving.pulled`."""
        return self.receiving.pulled(transfer, problem)

    def tick(self, now: Tick) -> list[Action]:
        """Time has passed: transfers that took too long, and then holds that are over."""
        self.now = now
        actions = self.sending.tick(now) + self.receiving.tick(now)
        self.holds.expire(now)
        return actions

    def instance_died(self, instance: str, incarnation: int) -> list[Action]:
        """Another instance is no more: its transfers end, and what it held here is given back.

        What it was sending is given back once nobody writes into it.
        """
        actions = self.sending.instance_died(instance) + self.receiving.instance_died(instance)
        coming = self.receiving.owners()
        for owner in [hold.owner for hold in self.holds]:
            is_its = owner.instance == instance and owner.incarnation <= incarnation
            if is_its and owner not in coming:
                self.holds.release(owner)
        return actions
