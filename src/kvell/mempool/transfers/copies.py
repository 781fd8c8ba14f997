"""Copies of cached texts to other instances, which cache them too, without I/O.

The pages of a text are held here until the other instance has them, or the copy has ended.
"""

import itertools

import numpy as np
import numpy.typing as npt

from kvell.mempool.holds import Holds
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.tiers.sent import SentTexts
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.sending import Sending

NO_TOKEN = np.iinfo(np.int32).max
"""The token appended to a text so that all of the text can be matched: a hit leaves at least one
token. Negative ids would mean images."""


def whole(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return a text with an appended token, so that all of its tokens can be matched, int32."""
    return np.append(np.asarray(tokens, np.int32), np.int32(NO_TOKEN))


class Copies:
    """The running copies of one incarnation of an instance.

    :ivar sent: the texts that are also read from the CPU buffer; None: there is none.
    """

    def __init__(self, instance: str, incarnation: int, holds: Holds, sending: Sending) -> None:
        self._instance, self._incarnation = instance, incarnation
        self._holds, self._sending = holds, sending
        self.sent: SentTexts | None = None
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
        from_buffer: bool = False,
    ) -> tuple[Transfer | None, list[Action]]:
        """Begin to copy the cached part of a text; None if it has at most ``beyond`` tokens.

        :param from_buffer: whether pages may be read from the CPU buffer.  No step may run, since
            it may write them.
        """
        owner = Owner("departure", self._instance, self._incarnation, next(self._numbers))
        self._holds.hold_text(owner, deadline, whole(tokens), root, model=model)
        if from_buffer and self.sent is not None:
            self.sent.extend(owner)
        hold = self._holds[owner]
        if hold.hit_tokens <= beyond:
            self._release(owner)
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
        held = self._holds if self.sent is None else self.sent
        return transfer, actions + self._sending.ready(transfer, held.places(owner))

    def length(self, transfer: Transfer) -> int:
        return self._holds[self._owners[transfer]].hit_tokens

    def on_ended(self, transfer: Transfer) -> None:
        """Release the pages of an ended transfer, if it was one of these copies."""
        owner = self._owners.pop(transfer, None)
        if owner is not None:
            self._release(owner)

    def _release(self, owner: Owner) -> None:
        self._holds.release(owner)
        if self.sent is not None:
            self.sent.release(owner)
