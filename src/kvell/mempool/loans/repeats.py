"""Resent messages about loans, with the remaining time."""

import msgspec

from kvell.mempool.loans.messages import Borrow, Recall
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.messages import PeerMessage
from kvell.mempool.transfers.repeating import ResentMessage


def said_again(unanswered: ResentMessage, deadline: Tick | None, now: Tick) -> PeerMessage:
    """Return the message to resend now.

    :param deadline: the deadline of the loan, for the message's remaining time, or None.
    """
    message = unanswered.message
    if deadline is not None and isinstance(message, Borrow | Recall):
        return msgspec.structs.replace(message, ticks_left=deadline - now)
    return message
