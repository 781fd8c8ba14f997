"""Copies of cached texts to other instances, which cache them too, without I/O.

What is cached of a text is held here until the other instance has it, or the copy is over.
"""

import itertools

import numpy as np
import numpy.typing as npt

from kvell.mempool.holds import Holds
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.sending import Sending

NO_TOKEN = np.iinfo(np.int32).max
"""Behind the last token of a text, all of which may be found: a hit leaves at least one token.
Negative ones would stand for images."""


def whole(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """A text all of whose tokens may be found, int32."""
    return np.append(np.asarray(tokens, np.int32), np.int32(NO_TOKEN))


class Copies:
    """Copies of one incarnation of an instance that are under way."""

    def __init__(self, instance: str, incarnation: int, holds: Holds, sending: Sending) -> None:
        self._instance, self._incarnation = instance, incarnation
        self._holds, self._sending = holds, sending
        self._owners: dict[Transfer, Owner] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._owners)

    def begin(
        self,
        target: str,
        tokens: npt.NDArray[np.int32],
        now: Tick,
        deadline: Tick,
        *,
        root: str = "",
        model: str = "",
        beyond: int = 0,
        inserts: bool = True,
        private: bytes = b"",
    ) -> tuple[Transfer | None, list[Action]]:
        """Begin to copy what is cached of a text; None if that is no more than ``beyond`` tokens.

        :param tokens: int32; all of them are wanted.
        :param inserts: whether the receiver caches it, or hands it to its waiting user.
        """
        owner = Owner("departure", self._instance, self._incarnation, next(self._numbers))
        hold = self._holds.hold_text(owner, deadline, whole(tokens), root, model=model)
        if hold.hit_tokens <= beyond:
            self._holds.release(owner)
            return None, []
        transfer, actions = self._sending.begin(
            target,
            hold.tokens,
            hold.hit_tokens,
            now,
            deadline,
            root=root,
            model=model,
            inserts=inserts,
            private=private,
        )
        self._owners[transfer] = owner
        return transfer, actions + self._sending.ready(transfer, self._holds.places(owner))

    def length(self, transfer: Transfer) -> int:
        """Tokens that a copy under way takes along."""
        return self._holds[self._owners[transfer]].hit_tokens

    def ended(self, transfer: Transfer) -> None:
        """A transfer is over, if it was one of these: let its pages go."""
        owner = self._owners.pop(transfer, None)
        if owner is not None:
            self._holds.release(owner)
