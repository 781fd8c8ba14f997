"""The receiver's side of transfers, without I/O.

::

    Prepare ──► PREPARED ──Offer──► PULLING ──pulled──► arrived: inserted, or held for its user
       │            └─ Abandon, deadline ──► ended │
       └─ refused                                  └─ Abandon, deadline ──► ENDING ──pulled──► ended

A text that is offered while it is computed is pulled in stages; that pull ends only after the
second offer, which reports that all is written.

A text that is to be cached is received in the CPU buffer, if there is one and the pool has no room.
Pages that are being written are not reused before the pull has ended.  A copy is valid only if the
right to read was still valid afterwards, as ``PullExecutor`` reports.  Unanswered messages are
resent, so a hold for a transfer that the sender has given up ends soon.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from kvell.memory import Ints
from kvell.mempool.exchanges import Exchange, ExchangeSide, send
from kvell.mempool.holds import Holds
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.tiers.received import ReceivedTexts
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
from kvell.prefix.groups.facts import IMAGE_COLUMNS

FOREVER: Tick = 1 << 62
ILLEGIBLE = "the request's private data cannot be decoded"
REMEMBERED = 1024
"""The number of completed transfers to remember, for senders that missed the ``Pulled``."""
NOTHING: Ints = np.empty((0, 3), np.int32)


@dataclass
class _IncomingTransfer(Exchange):
    """One incoming transfer.

    :ivar missing: int32 [m, 3]: group, position, local page.
    :ivar is_whole: whether the sender has written all of the text.
    """

    owner: Owner
    computed: int
    inserts: bool
    announced: bytes
    missing: Ints
    private: bytes = b""
    pages: bytes = b""
    is_pulling: bool = False
    is_whole: bool = False
    is_over: bool = False


class Receiving(ExchangeSide[Transfer, _IncomingTransfer]):
    """The incoming transfers of one instance.

    :param holds: the holds of the instance; a transfer's hold has owner kind ``arrival``.
    :param most_transfers: the most concurrent transfers; further ones are refused.
    """

    def __init__(self, fingerprint: str, holds: Holds, most_transfers: int = 256) -> None:
        super().__init__()
        self._fingerprint, self._holds = fingerprint, holds
        self._most_transfers = most_transfers
        self.admits: Callable[[int, int], bool] = lambda _handle, _computed: True
        """Whether a text is accepted, given its handle and its number of computed tokens."""
        self.is_legible: Callable[[Prepare | Offer], bool] = lambda _message: True
        """Whether the user of a text can decode the message's private bytes."""
        self.buffered: ReceivedTexts | None = None
        """The texts that come into the CPU buffer; None: there is none."""
        self.is_closed = False
        """Whether further texts are refused."""
        self._came: dict[Transfer, None] = {}

    def prepare(self, sender: str, message: Prepare, now: Tick) -> list[Action]:
        """Hold the cached part of a text, and pages for the rest."""
        transfer = message.transfer
        if transfer in self.open or transfer in self._came:
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
            # If all tokens are cached here, even in a partly filled page, no page is pulled.
            is_here = hold.hit_tokens >= message.computed
            missing: Ints | None = NOTHING
            if not is_here:
                fits = self.admits(hold.handle, message.computed)
                missing = self._holds.receive(owner, message.computed) if fits else None
        except ValueError as error:
            self._holds.release(owner)
            return [Send(sender, Abandon(transfer, str(error)))]
        if missing is None:
            self._holds.release(owner)
            missing = self._buffered(owner, message, tokens)
        if missing is None:
            return [Send(sender, Abandon(transfer, "there is no room"))]
        prepared = Prepared(transfer, missing[:, :2].astype("<i4").tobytes())
        coming = self.open[transfer] = _IncomingTransfer(
            sender,
            deadline,
            owner,
            max(message.computed, hold.hit_tokens),
            message.inserts,
            message.private,
            missing,
        )
        return [send(coming, prepared, now)]

    def _buffered(self, owner: Owner, message: Prepare, tokens: Ints) -> Ints | None:
        """Reserve pages in the CPU buffer for a text; None if it cannot be there."""
        if self.buffered is None or not message.inserts:
            return None
        try:
            return self.buffered.reserve(
                owner, tokens, message.computed, message.root, message.model
            )
        except ValueError:  # the model is not served here
            return None

    def offer(self, sender: str, message: Offer) -> list[Action]:
        """Begin to pull the missing pages, or pull the rest once all is written."""
        coming = self.of(sender, message.transfer)
        if message.transfer in self._came:
            return [Send(sender, Pulled(message.transfer))]
        if coming is None or coming.is_over:
            return [Send(sender, Abandon(message.transfer, "it has ended"))]
        if coming.is_whole or (coming.is_pulling and message.stages):  # a repetition
            return []
        if len(message.pages) != 4 * len(coming.missing) or message.stages < 0:
            return self._over(message.transfer, "the offer does not match the missing pages")
        if not message.stages:
            if not coming.inserts and not self.is_legible(message):
                return self._over(message.transfer, ILLEGIBLE)
            coming.is_whole = True
            coming.private = message.private
        if coming.is_pulling:
            if message.pages != coming.pages:
                return self._over(message.transfer, "an earlier offer has other pages")
            return [PullRest(message.transfer)]
        coming.is_pulling = True
        coming.pages = message.pages
        coming.unanswered = None
        pages = np.frombuffer(message.pages, "<i4")
        rows = np.stack([coming.missing[:, 0], pages, coming.missing[:, 2]], axis=1)
        return [Pull(message.transfer, np.ascontiguousarray(rows, np.int32), message.stages)]

    def on_pulled(self, transfer: Transfer, problem: str) -> list[Action]:
        """Handle the end of a pull.

        :param problem: "" if all pages were copied and the right to read was still valid then.
        """
        coming = self.open.pop(transfer)
        if coming.is_over:
            self._release(coming.owner)
            return []
        if problem:
            self._release(coming.owner)
            return [Send(coming.peer, Abandon(transfer, problem))]
        if self.buffered is not None and coming.owner in self.buffered:
            self.buffered.insert(coming.owner)
        elif coming.inserts:
            self._holds.insert(coming.owner, coming.computed)
        else:  # for its user, until the sender's deadline
            assert coming.deadline is not None, "only an ended transfer has none"
            self._holds[coming.owner].deadline = coming.deadline
        self._came[transfer] = None
        if len(self._came) > REMEMBERED:
            del self._came[next(iter(self._came))]
        arrived = Arrived(
            transfer,
            coming.computed,
            coming.announced,
            coming.private,
            coming.inserts,
            tuple(np.bincount(coming.missing[:, 0]).tolist()),
        )
        return [Send(coming.peer, Pulled(transfer)), arrived]

    def on_abandoned(self, sender: str, message: Abandon) -> list[Action]:
        if self.of(sender, message.transfer) is None:
            return []
        return self.end(message.transfer)

    def refuse(self, is_unwanted: Callable[[bytes], bool]) -> list[Action]:
        """End incoming texts for the local user whose announcement ``is_unwanted``."""
        unwanted = [
            transfer
            for transfer, coming in self.open.items()
            if not (coming.inserts or coming.is_over) and is_unwanted(coming.announced)
        ]
        return [a for transfer in unwanted for a in self._over(transfer, "it is not needed")]

    def instance_died(self, instance: str) -> list[Action]:
        gone = self.of_instance(instance)
        return [action for transfer in gone for action in self.end(transfer)]

    @override
    def _over(self, transfer: Transfer, why: str) -> list[Action]:
        sender = self.open[transfer].peer
        return [*self.end(transfer), Send(sender, Abandon(transfer, why))]

    def end(self, transfer: Transfer) -> list[Action]:
        """Release the pages, or stop the pull that writes into them."""
        coming = self.open[transfer]
        if not coming.is_pulling:
            del self.open[transfer]
            self._release(coming.owner)
            return []
        stops: list[Action] = [] if coming.is_over else [StopPull(transfer)]
        coming.is_over, coming.deadline = True, None
        return stops

    def _release(self, owner: Owner) -> None:
        self._holds.release(owner)
        if self.buffered is not None:
            self.buffered.release(owner)

    def _problem(self, sender: str, message: Prepare) -> str:
        if message.transfer.sender != sender:
            return "it is in another instance's name"
        if message.fingerprint != self._fingerprint:
            return "the layouts of the two instances differ"
        if self.is_closed:
            return "the instance is draining"
        if len(self.open) >= self._most_transfers:
            return "too many texts are in transit"
        if len(message.tokens) % 4 or not 0 < message.computed <= len(message.tokens) // 4:
            return "there are no such tokens"
        if message.ticks_left <= 0:
            return "its deadline has passed"
        if len(message.images) % (4 * IMAGE_COLUMNS):
            return "there are no such images"
        if not message.inserts and not self.is_legible(message):
            return ILLEGIBLE
        return ""


def owner_of(transfer: Transfer) -> Owner:
    return Owner("arrival", transfer.sender, transfer.incarnation, transfer.number)
