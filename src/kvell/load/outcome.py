"""What became of one request, as its client saw it."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Outcome:
    """One request that ended; seconds since the run began.

    :param due_seconds: when it should have been sent.
    :param sent_seconds: when it was, before a connection was there.
    :param token_seconds: when the pieces of its answer came; those of one network packet came
        together.
    :param output_tokens: as the server counts them.
    :param cached_tokens: of its prompt, where the server says so.
    :param failure: why there is no whole answer; None if there is one, or nobody waited for it.
    :param hung_up: its client left midway.
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
        """It has a whole answer."""
        return self.failure is None and not self.hung_up

    @property
    def lag_seconds(self) -> float:
        """How late the generator itself sent it."""
        return self.sent_seconds - self.due_seconds

    @property
    def ttft_seconds(self) -> float:
        """From sending to the first token with content."""
        return self.token_seconds[0] - self.sent_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time per output token after the first; None for a single one."""
        if self.output_tokens < 2:
            return None
        return (self.token_seconds[-1] - self.token_seconds[0]) / (self.output_tokens - 1)

    @property
    def e2e_seconds(self) -> float:
        """From sending to the end of the answer."""
        return self.ended_seconds - self.sent_seconds

    @property
    def inter_token_seconds(self) -> list[float]:
        """Between one piece of the answer and the next."""
        return [after - before for before, after in pairwise(self.token_seconds)]
