"""The sender's side of transfers, without I/O.

::

    ASKED ──Prepared──► OFFERED ──Pulled──► ended
      └──────── Abandon, deadline, the receiver dies ──► ended with a problem

The pages of a text are held from its start to its end.  The right to read them is granted with the
offer and revoked before they are let go.
"""

from dataclasses import dataclass

import numpy as np

from kvell.mempool.holds import Holds
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.transfers.actions import Action, Ended, Grant, Revoke, Send
from kvell.mempool.transfers.messages import Abandon, Offer, Prepare, Prepared, Pulled, Transfer


@dataclass
class _Sent:
    """One transfer on its way out."""

    target: str
    owner: Owner
    deadline: Tick
    is_offered: bool = False


class Sending:
    """Transfers of one incarnation of an instance to others.

    :param holds: of the instance; a transfer's hold is its own until it ends.
    """

    def __init__(self, instance: str, incarnation: int, fingerprint: str, holds: Holds) -> None:
        self._instance, self._incarnation = instance, incarnation
        self._fingerprint, self._holds = fingerprint, holds
        self._sent: dict[Transfer, _Sent] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, transfer: Transfer) -> bool:
        return transfer in self._sent

    @property
    def next_deadline(self) -> Tick | None:
        """When the next transfer is given up; None if there is none."""
        return min((one.deadline for one in self._sent.values()), default=None)

    def begin(
        self,
        target: str,
        owner: Owner,
        computed: int,
        now: Tick,
        deadline: Tick,
        *,
        root: str = "",
        model: str = "",
        inserts: bool = True,
        private: bytes = b"",
    ) -> tuple[Transfer, list[Action]]:
        """Send the first ``computed`` tokens of a text that ``owner`` holds.

        The hold must have every page behind which a request resumes there.  It lasts as long as
        the transfer.
        """
        self._number += 1
        transfer = Transfer(self._instance, self._incarnation, self._number)
        self._holds.extend(owner, deadline)
        self._sent[transfer] = _Sent(target, owner, deadline)
        prepare = Prepare(
            transfer,
            self._fingerprint,
            self._holds[owner].tokens.astype("<i4").tobytes(),
            computed,
            root,
            model,
            deadline - now,
            inserts,
            private,
        )
        return transfer, [Send(target, prepare)]

    def prepared(self, sender: str, message: Prepared) -> list[Action]:
        """The receiver has room, and says which pages it lacks."""
        sent = self._sent.get(message.transfer)
        if sent is None or sent.target != sender:
            return [Send(sender, Abandon(message.transfer, "it is over"))]
        if sent.is_offered:
            return []
        places = {(g, at): page for g, at, page in self._holds.pages(sent.owner).tolist()}
        missing = np.frombuffer(message.missing, "<i4").reshape(-1, 2).tolist()
        try:
            pages = [places[group, position] for group, position in missing]
        except KeyError:
            return self._over(message.transfer, "pages are asked for that are not there")
        sent.is_offered = True
        offer = Offer(message.transfer, np.asarray(pages, "<i4").tobytes())
        return [Grant(message.transfer), Send(sender, offer)]

    def pulled(self, sender: str, message: Pulled) -> list[Action]:
        """The receiver has it all."""
        sent = self._sent.get(message.transfer)
        if sent is None or sent.target != sender or not sent.is_offered:
            return []
        return self._ended(message.transfer, "")

    def abandoned(self, sender: str, message: Abandon) -> list[Action]:
        """The receiver has given it up."""
        sent = self._sent.get(message.transfer)
        if sent is None or sent.target != sender:
            return []
        return self._ended(message.transfer, message.why)

    def cancel(self, transfer: Transfer, why: str) -> list[Action]:
        """Give a transfer up; nothing if it is over."""
        return self._over(transfer, why) if transfer in self._sent else []

    def tick(self, now: Tick) -> list[Action]:
        """Give up what has passed its deadline."""
        late = [one for one, sent in self._sent.items() if sent.deadline <= now]
        return [action for one in late for action in self._over(one, "it took too long")]

    def instance_died(self, instance: str) -> list[Action]:
        """End what went to an instance that is no more."""
        gone = [one for one, sent in self._sent.items() if sent.target == instance]
        return [action for one in gone for action in self._ended(one, f"{instance} died")]

    def _over(self, transfer: Transfer, why: str) -> list[Action]:
        target = self._sent[transfer].target
        return [*self._ended(transfer, why), Send(target, Abandon(transfer, why))]

    def _ended(self, transfer: Transfer, problem: str) -> list[Action]:
        """Revoke first: from then on others may get the pages."""
        sent = self._sent.pop(transfer)
        actions: list[Action] = [Revoke(transfer)] if sent.is_offered else []
        self._holds.release(sent.owner)
        return [*actions, Ended(transfer, problem)]
