"""The sender's side of transfers, without I/O.

::

    ASKED ──Prepared──► PREPARED ──ready──► OFFERED ──Pulled──► ended
      │                    │ └─early─► EARLY ─┘ │
      └────────────────────┴── Abandon, deadline, the receiver dies ──► ended with a problem

Whoever begins a transfer holds the pages: from ``early`` or ``ready`` until it is told ``Ended``.
The right to read them is granted with the first offer and revoked before that.  A text may be
announced before it is computed, so that the receiver has room when it is.  What is not answered is
said again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.memory import Images
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action, Ended, Grant, Revoke, RoomGranted, Send
from kvell.mempool.transfers.messages import Abandon, Offer, Prepare, Prepared, Pulled, Transfer
from kvell.mempool.transfers.numbers import RightNumbers
from kvell.mempool.transfers.repeating import Repeated

Places = Mapping[tuple[int, int], int]
"""(group, position) → page of the sender."""


@dataclass
class _Sent:
    """One transfer on its way out.

    :ivar computed: tokens that the transfer is about.
    :ivar missing: (group, position) of the pages that the receiver lacks; None until it says so.
    :ivar ready: where the text's pages are, once they are computed, and what goes with them.
    :ivar early: pages that were offered while they are computed; None if none were.
    :ivar unanswered: what the receiver is to answer next; None while the text is computed.
    """

    target: str
    computed: int
    deadline: Tick
    unanswered: Repeated | None
    missing: list[list[int]] | None = None
    ready: tuple[Places, bytes] | None = None
    early: bytes | None = None
    is_offered: bool = False

    @property
    def is_granted(self) -> bool:
        """Whether the receiver may read."""
        return self.is_offered or self.early is not None


class Sending:
    """Transfers of one incarnation of an instance to others.

    :param most_pages: that each group of the layout has at most, which ``fingerprint`` stands for.
    :param numbers: of the incarnation's rights, which loans have too.
    """

    def __init__(
        self,
        instance: str,
        incarnation: int,
        fingerprint: str,
        most_pages: Sequence[int],
        numbers: RightNumbers,
    ) -> None:
        self._instance, self._incarnation = instance, incarnation
        self._fingerprint, self._pages = fingerprint, tuple(most_pages)
        self._sent: dict[Transfer, _Sent] = {}
        self._numbers = numbers
        self._now: Tick = 0

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, transfer: Transfer) -> bool:
        return transfer in self._sent

    @property
    def next_deadline(self) -> Tick | None:
        """When :meth:`tick` has something to do; None without any transfer."""
        repeated = (one.unanswered for one in self._sent.values())
        ticks = [one.deadline for one in self._sent.values()]
        return min([*ticks, *(one.at for one in repeated if one is not None)], default=None)

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

        :param tokens: int32, maybe more of them.
        :param images: int32 [n, 3] of it, which come with it; None without any.
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
        self._sent[transfer] = _Sent(target, computed, deadline, Repeated.said(prepare, now))
        return transfer, [Send(target, prepare)]

    def missing(self, transfer: Transfer) -> list[list[int]]:
        """(group, position) of the pages that the receiver lacks; empty if it has not said so."""
        sent = self._sent.get(transfer)
        return [] if sent is None else sent.missing or []

    def early(self, transfer: Transfer, places: Places, stages: int) -> list[Action]:
        """Offer a text that the next step computes to its end, once the receiver has room.

        :meth:`ready` must follow with that step's result, with the same pages for what is
        missing, or :meth:`cancel`.

        :param stages: of layers, in which it is computed; 1 or more.
        """
        sent = self._sent.get(transfer)
        if sent is None or sent.missing is None or sent.is_granted:
            return []
        pages = _pages(sent.missing, places)
        if pages is None:  # what is not there yet is offered later
            return []
        sent.early = pages
        offer = Offer(transfer, pages, stages=stages)
        return [_grant(transfer, sent, pages), self._said(sent, offer)]

    def ready(self, transfer: Transfer, places: Places, private: bytes = b"") -> list[Action]:
        """The text is computed, and its pages are held; nothing if the transfer is over.

        :param places: every page behind which a request resumes there.
        :param private: goes to the receiver's user with the text.
        """
        sent = self._sent.get(transfer)
        if sent is None:
            return []
        sent.ready = places, private
        return self._offered(transfer, sent)

    def prepared(self, sender: str, message: Prepared) -> list[Action]:
        """The receiver has room, and says which pages it lacks."""
        sent = self._sent.get(message.transfer)
        if sent is None or sent.target != sender:
            return [Send(sender, Abandon(message.transfer, "it is over"))]
        if sent.missing is not None:  # said again: an offer may have got lost
            return [] if sent.unanswered is None else [Send(sender, sent.unanswered.message)]
        missing = _checked(message.missing, self._pages)
        if missing is None:
            return self._over(message.transfer, "there are no such pages")
        sent.unanswered = None
        sent.missing = missing
        return [RoomGranted(message.transfer), *self._offered(message.transfer, sent)]

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
        """Give up what has passed its deadline, and say again what is not answered."""
        self._now = now
        late = [one for one, sent in self._sent.items() if sent.deadline <= now]
        actions = [action for one in late for action in self._over(one, "it took too long")]
        for sent in self._sent.values():
            if sent.unanswered is not None and sent.unanswered.is_due(now):
                actions.append(Send(sent.target, sent.unanswered.message))
        return actions

    def instance_died(self, instance: str) -> list[Action]:
        """End what went to an instance that is no more."""
        gone = [one for one, sent in self._sent.items() if sent.target == instance]
        return [action for one in gone for action in self._ended(one, f"{instance} died")]

    def _offered(self, transfer: Transfer, sent: _Sent) -> list[Action]:
        """Offer what is missing, once that is known and there."""
        if sent.missing is None or sent.ready is None or sent.is_offered:
            return []
        places, private = sent.ready
        pages = _pages(sent.missing, places)
        if pages is None:
            return self._over(transfer, "pages are asked for that are not there")
        if sent.early not in (None, pages):
            return self._over(transfer, "its pages lie elsewhere than was offered")
        grants = [] if sent.is_granted else [_grant(transfer, sent, pages)]
        sent.is_offered = True
        return [*grants, self._said(sent, Offer(transfer, pages, private))]

    def _said(self, sent: _Sent, offer: Offer) -> Send:
        """Make an offer, which is said again until the receiver answers or there is a newer one."""
        sent.unanswered = Repeated.said(offer, self._now)
        return Send(sent.target, offer)

    def _over(self, transfer: Transfer, why: str) -> list[Action]:
        target = self._sent[transfer].target
        return [*self._ended(transfer, why), Send(target, Abandon(transfer, why))]

    def _ended(self, transfer: Transfer, problem: str) -> list[Action]:
        """Revoke first: from then on others may get the pages."""
        sent = self._sent.pop(transfer)
        self._numbers.free(transfer.number)
        actions: list[Action] = [Revoke(transfer)] if sent.is_granted else []
        return [*actions, Ended(transfer, problem)]


def _grant(transfer: Transfer, sent: _Sent, pages: bytes) -> Grant:
    """The right to read what is offered, and nothing else."""
    assert sent.missing is not None, "pages are offered once it is known which are missing"
    groups = np.asarray(sent.missing, "<i4").reshape(-1, 2)[:, 0]
    pairs = np.stack([groups, np.frombuffer(pages, "<i4")], axis=1)
    return Grant(transfer, sent.target, pairs.astype("<i4").tobytes())


def _checked(missing: bytes, most_pages: Sequence[int]) -> list[list[int]] | None:
    """(group, position) of pages as a receiver tells them; None if there are no such pages.

    :param most_pages: of each group.
    """
    if len(missing) % 8 or len(missing) // 8 > sum(most_pages):
        return None
    pairs = np.frombuffer(missing, "<i4").reshape(-1, 2)
    if len(pairs) and (pairs.min() < 0 or pairs[:, 0].max() >= len(most_pages)):
        return None
    return pairs.tolist()


def _pages(missing: Sequence[Sequence[int]], places: Places) -> bytes | None:
    """Pages of what is missing as an offer tells them; None if one is not there."""
    try:
        pages = [places[group, position] for group, position in missing]
    except KeyError:
        return None
    return np.asarray(pages, "<i4").tobytes()
