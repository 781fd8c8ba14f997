"""The receiver's side of transfers, without I/O.

::

    Prepare ──► PREPARED ──Offer──► PULLING ──pulled──► arrived: inserted, or held for its user
       │            └─ Abandon, deadline ──► gone  │
       └─ refused                                   └─ Abandon, deadline ──► ENDING ──pulled──► gone

A text that is offered while it is computed is pulled in stages; that pull ends only behind the
second offer, which says that all is written.

Pages that are being written are not given to others before the copying has ended.  What was copied
counts only if the right to read it still stood afterwards, which the mover has to say.  What
the sender does not answer is said again, so a hold for a transfer that it has given up ends soon.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvell.memory import Ints
from kvell.mempool.holds import Holds
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.transfers.actions import Action, Arrived, Pull, PullRest, Send, StopPull
from kvell.mempool.transfers.messages import (
    MOST_TICKS,
    Abandon,
    Offer,
    Prepare,
    Prepared,
    Pulled,
    Transfer,
)
from kvell.mempool.transfers.repeating import Repeated
from kvell.prefix.groups.facts import IMAGE_COLUMNS

FOREVER: Tick = 1 << 62
ILLEGIBLE = "what was said of the request cannot be read"
REMEMBERED = 1024
"""Transfers that have come are remembered, for senders who have not heard that they did."""
NOTHING: Ints = np.empty((0, 3), np.int32)


@dataclass
class _Coming:
    """One transfer on its way in.

    :ivar missing: int32 [m, 3]: group, position, own page.
    :ivar unanswered: what the sender is to answer with an offer.
    :ivar pages: of the sender, as they are being pulled.
    :ivar is_whole: whether all of the text is written there.
    """

    sender: str
    owner: Owner
    deadline: Tick
    computed: int
    inserts: bool
    announced: bytes
    missing: Ints
    unanswered: Repeated
    private: bytes = b""
    pages: bytes = b""
    is_pulling: bool = False
    is_whole: bool = False
    is_over: bool = False


class Receiving:
    """Transfers from other instances to one.

    :param holds: of the instance; a transfer's hold has owner kind ``arrival``.
    :param most_transfers: further ones are refused.
    """

    def __init__(self, fingerprint: str, holds: Holds, most_transfers: int = 256) -> None:
        self._fingerprint, self._holds = fingerprint, holds
        self._most_transfers = most_transfers
        self.admits: Callable[[int, int], bool] = lambda _handle, _computed: True
        """Whether a text may come: its handle, and how much of it."""
        self.is_legible: Callable[[Prepare | Offer], bool] = lambda _message: True
        """Whether the user of a text can read what is said of it."""
        self.is_closed = False
        """Whether no further text may come."""
        self._coming: dict[Transfer, _Coming] = {}
        self._came: dict[Transfer, None] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def __contains__(self, transfer: Transfer) -> bool:
        return transfer in self._coming

    @property
    def next_deadline(self) -> Tick | None:
        """When :meth:`tick` has something to do; None without any transfer."""
        waiting = [one for one in self._coming.values() if not one.is_over]
        deadlines = [one.deadline for one in waiting]
        repeats = [one.unanswered.at for one in waiting if not one.is_pulling]
        return min(deadlines + repeats, default=None)

    def owners(self) -> set[Owner]:
        """Who holds the texts that are on their way."""
        return {one.owner for one in self._coming.values()}

    def prepare(self, sender: str, message: Prepare, now: Tick) -> list[Action]:
        """Hold what is here of a text, and pages for the rest."""
        transfer = message.transfer
        if transfer in self._coming or transfer in self._came:
            return []
        problem = self._problem(sender, message)
        if problem:
            return [Send(sender, Abandon(transfer, problem))]
        owner = owner_of(transfer)
        tokens = np.frombuffer(message.tokens, "<i4").astype(np.int32)
        deadline = now + min(message.ticks_left, MOST_TICKS)
        images = np.frombuffer(message.images, "<i4").astype(np.int32).reshape(-1, IMAGE_COLUMNS)
        try:
            hold = self._holds.hold_text(
                owner,
                FOREVER,
                tokens,
                message.root,
                model=message.model,
                images=images if len(images) else None,
            )
            # Of a text that is here as far, even a half-full page is better than the sender's.
            is_here = hold.hit_tokens >= message.computed
            if not is_here and not self.admits(hold.handle, message.computed):
                self._holds.release(owner)
                return [Send(sender, Abandon(transfer, "there is no room"))]
            missing = NOTHING if is_here else self._holds.receive(owner, message.computed)
        except ValueError as error:
            self._holds.release(owner)
            return [Send(sender, Abandon(transfer, str(error)))]
        if missing is None:
            return [Send(sender, Abandon(transfer, "there is no room"))]
        prepared = Prepared(transfer, missing[:, :2].astype("<i4").tobytes())
        self._coming[transfer] = _Coming(
            sender,
            owner,
            deadline,
            max(message.computed, hold.hit_tokens),
            message.inserts,
            message.private,
            missing,
            Repeated.said(prepared, now),
        )
        return [Send(sender, prepared)]

    def offer(self, sender: str, message: Offer) -> list[Action]:
        """Begin to pull what was missing, or go on with it once all of it is written."""
        coming = self._coming.get(message.transfer)
        if message.transfer in self._came:
            return [Send(sender, Pulled(message.transfer))]
        if coming is None or coming.sender != sender or coming.is_over:
            return [Send(sender, Abandon(message.transfer, "it is over"))]
        if coming.is_whole or (coming.is_pulling and message.stages):  # it is said again
            return []
        if len(message.pages) != 4 * len(coming.missing) or message.stages < 0:
            return self._over(message.transfer, "not what was missing was offered")
        if not message.stages:
            if not coming.inserts and not self.is_legible(message):
                return self._over(message.transfer, ILLEGIBLE)
            coming.is_whole, coming.private = True, message.private
        if coming.is_pulling:
            if message.pages != coming.pages:
                return self._over(message.transfer, "other pages were offered first")
            return [PullRest(message.transfer)]
        coming.is_pulling, coming.pages = True, message.pages
        pages = np.frombuffer(message.pages, "<i4")
        rows = np.stack([coming.missing[:, 0], pages, coming.missing[:, 2]], axis=1)
        return [Pull(message.transfer, np.ascontiguousarray(rows, np.int32), message.stages)]

    def pulled(self, transfer: Transfer, problem: str) -> list[Action]:
        """Copying has ended.

        :param problem: "" if everything was copied and the right to read still stood then.
        """
        coming = self._coming.pop(transfer)
        if coming.is_over:
            self._holds.release(coming.owner)
            return []
        if problem:
            self._holds.release(coming.owner)
            return [Send(coming.sender, Abandon(transfer, problem))]
        if coming.inserts:
            self._holds.insert(coming.owner, coming.computed)
        else:  # for its user, who must come while the sender would have waited
            self._holds[coming.owner].deadline = coming.deadline
        self._came[transfer] = None
        if len(self._came) > REMEMBERED:
            del self._came[next(iter(self._came))]
        arrived = Arrived(
            transfer, coming.computed, coming.announced, coming.private, coming.inserts
        )
        return [Send(coming.sender, Pulled(transfer)), arrived]

    def abandoned(self, sender: str, message: Abandon) -> list[Action]:
        """The sender has given it up."""
        coming = self._coming.get(message.transfer)
        if coming is None or coming.sender != sender:
            return []
        return self._ended(message.transfer)

    def refuse(self, is_unwanted: Callable[[bytes], bool]) -> list[Action]:
        """Give up texts for this instance's user, of whose announcements it says so."""
        unwanted = [
            transfer
            for transfer, one in self._coming.items()
            if not (one.inserts or one.is_over) and is_unwanted(one.announced)
        ]
        return [action for one in unwanted for action in self._over(one, "it is not wanted")]

    def tick(self, now: Tick) -> list[Action]:
        """Give up what has passed its deadline, and say again what is not answered."""
        late = [t for t, one in self._coming.items() if one.deadline <= now and not one.is_over]
        actions = [action for one in late for action in self._over(one, "it took too long")]
        for one in self._coming.values():
            if not (one.is_over or one.is_pulling) and one.unanswered.is_due(now):
                actions.append(Send(one.sender, one.unanswered.message))
        return actions

    def instance_died(self, instance: str) -> list[Action]:
        """End what came from an instance that is no more."""
        gone = [transfer for transfer, one in self._coming.items() if one.sender == instance]
        return [action for one in gone for action in self._ended(one)]

    def _over(self, transfer: Transfer, why: str) -> list[Action]:
        sender = self._coming[transfer].sender
        return [*self._ended(transfer), Send(sender, Abandon(transfer, why))]

    def _ended(self, transfer: Transfer) -> list[Action]:
        """Give the pages back, or wait until nobody writes into them."""
        coming = self._coming[transfer]
        if not coming.is_pulling:
            del self._coming[transfer]
            self._holds.release(coming.owner)
            return []
        stops: list[Action] = [] if coming.is_over else [StopPull(transfer)]
        coming.is_over = True
        return stops

    def _problem(self, sender: str, message: Prepare) -> str:
        if message.transfer.sender != sender:
            return "it is in another instance's name"
        if message.fingerprint != self._fingerprint:
            return "the layouts of the two instances differ"
        if self.is_closed:
            return "the instance is draining"
        if len(self._coming) >= self._most_transfers:
            return "too many texts are on their way"
        if len(message.tokens) % 4 or not 0 < message.computed <= len(message.tokens) // 4:
            return "there are no such tokens"
        if message.ticks_left <= 0:
            return "its time is over"
        if len(message.images) % (4 * IMAGE_COLUMNS):
            return "there are no such images"
        if not message.inserts and not self.is_legible(message):
            return ILLEGIBLE
        return ""


def owner_of(transfer: Transfer) -> Owner:
    """Who holds a text that comes with a transfer."""
    return Owner("arrival", transfer.sender, transfer.incarnation, transfer.number)
