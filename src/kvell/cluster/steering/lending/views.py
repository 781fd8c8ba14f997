"""What the planner of loans knows of an instance: its last heartbeat, and what can be lent there.

Source: Infinite-LLM §6.2: ``heartbeat(List[RequestPlacementEntry])``.
"""

from dataclasses import dataclass

from kvell.cluster.steering.placements import Reach
from kvell.engine.protocol.messages import Heartbeat
from kvell.engine.protocol.placements import RequestPlacementEntry


@dataclass(frozen=True, slots=True)
class LendingView:
    """An instance, as its last heartbeat tells of it.

    :param beat: number of heartbeats so far, which tells a new one from the one before.
    :param reach: what can be lent there, and on which host it is read in place.
    :param token_bytes: most KV memory that a token takes.
    :param batch: requests that run.
    :param held_tokens: that their steps read.
    :param waiting_tokens: of the requests that hold no pages.
    :param longest: of those that run, the ones with most sections that could lie elsewhere, and how
        many of each.
    :param placements: of all requests with sections elsewhere.
    """

    beat: int
    reach: Reach
    token_bytes: int
    batch: int = 0
    held_tokens: int = 0
    waiting_tokens: int = 0
    longest: tuple[RequestPlacementEntry, ...] = ()
    placements: tuple[RequestPlacementEntry, ...] = ()

    @classmethod
    def of(cls, said: Heartbeat, beat: int, reach: Reach, token_bytes: int) -> "LendingView":
        """The view of an instance that has just said this."""
        return cls(
            *(beat, reach, token_bytes, said.running, said.held_tokens, said.waiting_tokens),
            *(said.longest, said.placements),
        )
