"""What is said again about a loan, with the time that is left by then."""

import msgspec

from kvell.mempool.loans.messages import Borrow, Recall
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.messages import PeerMessage
from kvell.mempool.transfers.repeating import Repeated


def said_again(unanswered: Repeated, deadline: Tick | None, now: Tick) -> PeerMessage:
    """The message, as it is said again now.

    :param deadline: of the loan, from which the message's time is counted; None: it has none.
    """
    message = unanswered.message
    if deadline is not None and isinstance(message, Borrow | Recall):
        return msgspec.structs.replace(message, ticks_left=deadline - now)
    return message
