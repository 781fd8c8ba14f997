"""Requests of an instance for texts of another one, without I/O.

::

    asker                                    owner
      │ ── Ask(text) ───────────────────────► │  begins to copy its cached part,
      │                                       │  from the pool and the CPU buffer
      │ ◄── a transfer, see messages ──────── │
      │ ◄── Declined ──────────────────────── │  or its cached part is no longer than the asker's

Source: MemServe §6.2, where an instance pulls the part of a prompt that a third one has.
"""

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvell.mempool.exchanges import Exchange, ExchangeSide
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action, Arrived, Ended, Fetched, Send
from kvell.mempool.transfers.copies import Copies
from kvell.mempool.transfers.messages import MOST_TICKS, Ask, Declined, Transfer

NOTHING_MORE = "no more of it is cached"


class Asking(ExchangeSide[int, Exchange]):
    """Both sides of the requests for texts of one incarnation of an instance."""

    def __init__(self, incarnation: int, fingerprint: str, copies: Copies) -> None:
        super().__init__()
        self._incarnation, self._fingerprint, self._copies = incarnation, fingerprint, copies
        self._answers: dict[Transfer, tuple[str, Ask]] = {}
        self._number = 0

    def ask(
        self,
        owner: str,
        tokens: npt.NDArray[np.int32],
        now: Tick,
        deadline: Tick,
        *,
        root: str = "",
        model: str = "",
        beyond: int = 0,
    ) -> tuple[int, list[Action]]:
        """Ask an instance for its cached part of a text; :class:`.Fetched` reports the result.

        :param tokens: int32; all of them may be sent.
        :param beyond: the number of tokens that are cached here already.
        """
        self._number += 1
        self.open[self._number] = Exchange(owner, deadline)
        ask = Ask(
            self._incarnation,
            self._number,
            self._fingerprint,
            tokens.astype("<i4").tobytes(),
            root,
            model,
            beyond,
            deadline - now,
        )
        return self._number, [Send(owner, ask)]

    def answer(self, asker: str, message: Ask, now: Tick) -> list[Action]:
        """Copy the cached part of a text to the asker, or decline."""
        if message.fingerprint != self._fingerprint:
            return [_declined(asker, message, "the layouts of the two instances differ")]
        if len(message.tokens) % 4 or message.ticks_left <= 0:
            return [_declined(asker, message, "there are no such tokens")]
        tokens = np.frombuffer(message.tokens, "<i4").astype(np.int32)
        try:
            transfer, actions = self._copies.begin(
                asker,
                tokens,
                now,
                now + min(message.ticks_left, MOST_TICKS),
                root=message.root,
                model=message.model,
                beyond=message.beyond,
                private=_named(message.incarnation, message.number),
                from_buffer=True,
            )
        except ValueError as error:  # the model is not served here
            return [_declined(asker, message, str(error))]
        if transfer is None:
            return [_declined(asker, message, NOTHING_MORE)]
        self._answers[transfer] = asker, message
        return actions

    def on_declined(self, owner: str, message: Declined) -> list[Action]:
        """Handle an instance's refusal to send a text."""
        is_mine = message.incarnation == self._incarnation
        if self.of(owner, message.number) is None or not is_mine:
            return []
        return self._over(message.number, message.why)

    def on_arrived(self, action: Arrived) -> list[Action]:
        """Report an arrived text, if its private bytes name a request of this instance."""
        for number, request in self.open.items():
            is_it = action.announced == _named(self._incarnation, number)
            if is_it and action.transfer.sender == request.peer:
                del self.open[number]
                return [Fetched(number, action.computed, "", action.pages)]
        return []

    def on_ended(self, action: Ended) -> list[Action]:
        answered = self._answers.pop(action.transfer, None)
        if answered is None or not action.problem:
            return []
        return [_declined(*answered, action.problem)]

    def instance_died(self, instance: str) -> list[Action]:
        gone = self.of_instance(instance)
        return [a for number in gone for a in self._over(number, f"{instance} died")]

    @override
    def _over(self, number: int, why: str) -> list[Action]:
        del self.open[number]
        return [Fetched(number, 0, why)]


def _named(incarnation: int, number: int) -> bytes:
    return msgspec.msgpack.encode(("asked", incarnation, number))


def _declined(asker: str, ask: Ask, why: str) -> Send:
    return Send(asker, Declined(ask.incarnation, ask.number, why))
