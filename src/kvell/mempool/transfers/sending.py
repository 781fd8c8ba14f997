"""The sender's side of transfers, without I/O.

::

    ASKED ──Prepared──► PREPARED ──ready──► OFFERED ──Pulled──► ended
      │                    │ └─early─► EARLY ─┘ │
      └────────────────────┴── Abandon, deadline, the receiver dies ──► ended with a problem

The caller that begins a transfer holds the pages from ``early`` or ``ready`` until ``Ended``.  The
right to read them is granted with the first offer and revoked before ``Ended``.  A text may be
announced before it is computed, so that the receiver has room in time.  Unanswered messages are
resent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvell.memory import Images
from kvell.mempool.exchanges import Exchange, ExchangeSide, send
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action, Ended, Grant, Revoke, RoomGranted, Send
from kvell.mempool.transfers.messages import Abandon, Offer, Prepare, Prepared, Pulled, Transfer
from kvell.mempool.transfers.numbers import RightNumbers

Places = Mapping[tuple[int, int], int]
"""The sender's pages by (group, position)."""


@dataclass
class _OutgoingTransfer(Exchange):
    """One outgoing transfer.

    :ivar missing: (group, position) of the pages that the receiver lacks; None before ``Prepared``.
    :ivar ready: the text's pages, once they are computed, and the private bytes.
    :ivar early: the pages that were offered while they are computed, or None.
    :ivar unanswered: None while the text is computed.
    """

    computed: int
    missing: list[list[int]] | None = None
    ready: tuple[Places, bytes] | None = None
    early: bytes | None = None
    is_offered: bool = False

    @property
    def is_granted(self) -> bool:
        return self.is_offered or self.early is not None


class Sending(ExchangeSide[Transfer, _OutgoingTransfer]):
    """The outgoing transfers of one incarnation of an instance.

    :param numbers: the numbers of its rights, shared with loans.
    """

    def __init__(
        self,
        instance: str,
        incarnation: int,
        fingerprint: str,
        most_pages: Sequence[int],
        numbers: RightNumbers,
    ) -> None:
        super().__init__()
        self._instance, self._incarnation = instance, incarnation
        self._fingerprint = fingerprint
        self.most_pages = tuple(most_pages)
        """The most pages of each group of the layout that a text has here."""
        self._numbers = numbers

    def begin(
        self,
        target: str,
        tokens: npt.NDArray[np.int32],
        computed: int,
        now: Tick,
        deadline: Tick,
        *,
        root: str = "",
        model: str = "",
        inserts: bool = True,
        private: bytes = b"",
        images: Images | None = None,
    ) -> tuple[Transfer, list[Action]]:
        """Announce the first ``computed`` tokens of a text, computed already or not.

        :param tokens: int32, at least ``computed`` of them.
        """
        transfer = Transfer(self._instance, self._incarnation, self._numbers.take())
        prepare = Prepare(
            transfer,
            self._fingerprint,
            tokens.astype("<i4").tobytes(),
            computed,
            root,
            model,
            deadline - now,
            inserts,
            private,
            b"" if images is None else images.astype("<i4").tobytes(),
        )
        sent = self.open[transfer] = _OutgoingTransfer(target, deadline, computed)
        return transfer, [send(sent, prepare, now)]

    def missing(self, transfer: Transfer) -> list[list[int]]:
        """Return (group, position) of the receiver's missing pages; empty before ``Prepared``."""
        sent = self.open.get(transfer)
        return [] if sent is None else sent.missing or []

    def early(self, transfer: Transfer, places: Places, stages: int) -> list[Action]:
        """Offer a text that the next step completes, if the receiver has room.

        :meth:`ready` with the same missing pages, or :meth:`cancel`, must follow with that step's
        result.

        :param stages: the number of stages of layers in which it is computed; 1 or more.
        """
        sent = self.open.get(transfer)
        if sent is None or sent.missing is None or sent.is_granted:
            return []
        pages = _pages(sent.missing, places)
        if pages is None:  # missing pages without a place yet are offered later
            return []
        sent.early = pages
        offer = Offer(transfer, pages, stages=stages)
        return [_grant(transfer, sent, pages), send(sent, offer, self._now)]

    def ready(self, transfer: Transfer, places: Places, private: bytes = b"") -> list[Action]:
        """Offer a computed text whose pages are held; no effect if the transfer has ended.

        :param places: every page that a request needs to resume after the text.
        :param private: bytes for the receiver's user.
        """
        sent = self.open.get(transfer)
        if sent is None:
            return []
        sent.ready = places, private
        return self._offered(transfer, sent)

    def on_prepared(self, sender: str, message: Prepared) -> list[Action]:
        """Handle the receiver's notice that it has room, and its missing pages."""
        sent = self.of(sender, message.transfer)
        if sent is None:
            return [Send(sender, Abandon(message.transfer, "it has ended"))]
        if sent.missing is not None:  # a repetition: an offer may have been lost
            return [] if sent.unanswered is None else [Send(sender, sent.unanswered.message)]
        missing = _checked(message.missing, self.most_pages)
        if missing is None:
            return self._over(message.transfer, "there are no such pages")
        sent.unanswered = None
        sent.missing = missing
        return [RoomGranted(message.transfer), *self._offered(message.transfer, sent)]

    def on_pulled(self, sender: str, message: Pulled) -> list[Action]:
        sent = self.of(sender, message.transfer)
        if sent is None or not sent.is_offered:
            return []
        return self._ended(message.transfer, "")

    def on_abandoned(self, sender: str, message: Abandon) -> list[Action]:
        if self.of(sender, message.transfer) is None:
            return []
        return self._ended(message.transfer, message.why)

    def cancel(self, transfer: Transfer, why: str) -> list[Action]:
        """Give up a transfer; no effect if it has ended."""
        return self._over(transfer, why) if transfer in self.open else []

    def instance_died(self, instance: str) -> list[Action]:
        gone = self.of_instance(instance)
        return [action for transfer in gone for action in self._ended(transfer, f"{instance} died")]

    def _offered(self, transfer: Transfer, sent: _OutgoingTransfer) -> list[Action]:
        """Offer the missing pages, once they are known and computed."""
        if sent.missing is None or sent.ready is None or sent.is_offered:
            return []
        places, private = sent.ready
        pages = _pages(sent.missing, places)
        if pages is None:
            return self._over(transfer, "the receiver asks for missing pages")
        if sent.early not in (None, pages):
            return self._over(transfer, "the pages differ from the first offer")
        grants = [] if sent.is_granted else [_grant(transfer, sent, pages)]
        sent.is_offered = True
        return [*grants, send(sent, Offer(transfer, pages, private), self._now)]

    @override
    def _over(self, transfer: Transfer, why: str) -> list[Action]:
        target = self.open[transfer].peer
        return [*self._ended(transfer, why), Send(target, Abandon(transfer, why))]

    def _ended(self, transfer: Transfer, problem: str) -> list[Action]:
        """End a transfer. The revocation is first, because the pages may be reused after it."""
        sent = self.open.pop(transfer)
        self._numbers.free(transfer.number)
        actions: list[Action] = [Revoke(transfer)] if sent.is_granted else []
        copied = [] if problem or sent.missing is None else [group for group, _ in sent.missing]
        pages = np.bincount(np.asarray(copied, np.int32))
        return [*actions, Ended(transfer, problem, tuple(pages.tolist()))]


def _grant(transfer: Transfer, sent: _OutgoingTransfer, pages: bytes) -> Grant:
    """Return the grant of the right to read only the offered pages."""
    assert sent.missing is not None, "pages are offered once it is known which are missing"
    groups = np.asarray(sent.missing, "<i4").reshape(-1, 2)[:, 0]
    pairs = np.stack([groups, np.frombuffer(pages, "<i4")], axis=1)
    return Grant(transfer, sent.peer, pairs.astype("<i4").tobytes())


def _checked(missing: bytes, most_pages: Sequence[int]) -> list[list[int]] | None:
    """Return (group, position) of a receiver's missing pages, or None if they are invalid."""
    if len(missing) % 8 or len(missing) // 8 > sum(most_pages):
        return None
    pairs = np.frombuffer(missing, "<i4").reshape(-1, 2)
    if len(pairs) and (pairs.min() < 0 or pairs[:, 0].max() >= len(most_pages)):
        return None
    return pairs.tolist()


def _pages(missing: Sequence[Sequence[int]], places: Places) -> bytes | None:
    """Return the missing pages as encoded in an offer, or None if one is not available."""
    try:
        pages = [places[group, position] for group, position in missing]
    except KeyError:
        return None
    return np.asarray(pages, "<i4").tobytes()
