"""The outcome of one request from its client's view."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Outcome:
    """An ended request; times are seconds since the run began.

    :param sent_seconds: time of sending, before a connection was open.
    :param token_seconds: arrival times of the pieces of its answer; pieces of one network
        packet have the same time.
    :param output_tokens: the server's count.
    :param cached_tokens: prompt tokens from the cache, if the server reports them.
    :param failure: reason why the answer is incomplete; None if it is complete or the client
        disconnected.
    :param hung_up: whether the client disconnected midway.
    """

    index: int
    due_seconds: float
    sent_seconds: float
    ended_seconds: float
    token_seconds: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    failure: str | None = None
    hung_up: bool = False

    @property
    def is_complete(self) -> bool:
        return self.failure is None and not self.hung_up

    @property
    def lag_seconds(self) -> float:
        return self.sent_seconds - self.due_seconds

    @property
    def ttft_seconds(self) -> float:
        return self.token_seconds[0] - self.sent_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """The mean seconds per output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.token_seconds[-1] - self.token_seconds[0]) / (self.output_tokens - 1)

    @property
    def e2e_seconds(self) -> float:
        return self.ended_seconds - self.sent_seconds

    @property
    def inter_token_seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self.token_seconds)]
