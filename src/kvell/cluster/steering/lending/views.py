"""The planner's view of an instance: its last heartbeat, and its limits for loans.

Source: Infinite-LLM §6.2: ``heartbeat(List[RequestPlacementEntry])``.
"""

from dataclasses import dataclass

from kvell.cluster.steering.placements import ContextLimits
from kvell.engine.protocol.messages import Heartbeat
from kvell.engine.protocol.placements import RequestPlacementEntry


@dataclass(frozen=True, slots=True)
class LendingView:
    """An instance, by its last heartbeat.

    :param beat: number of heartbeats so far, which identifies this one.
    :param reach: limits for loans, and the host on which they are read in place.
    :param token_bytes: most KV memory of a token.
    :param batch: number of running requests.
    :param held_tokens: tokens that their steps read.
    :param waiting_tokens: tokens of the requests that hold no pages.
    :param longest: the running requests with the most sections that could be stored elsewhere, and
        the number of these sections.
    :param placements: placements of all requests with remote sections.
    """

    beat: int
    reach: ContextLimits
    token_bytes: int
    batch: int = 0
    held_tokens: int = 0
    waiting_tokens: int = 0
    longest: tuple[RequestPlacementEntry, ...] = ()
    placements: tuple[RequestPlacementEntry, ...] = ()

    @classmethod
    def of(
        cls, last: Heartbeat, beat: int, reach: ContextLimits, token_bytes: int
    ) -> "LendingView":
        """Return the view of an instance after its last heartbeat."""
        return cls(
            *(beat, reach, token_bytes, last.running, last.held_tokens, last.waiting_tokens),
            *(last.longest, last.placements),
        )
