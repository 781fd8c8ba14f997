"""Which requests are late, step by step: what Algorithm 2 of eLLM is told.

A request is late with its first token while that has not come in time, and with its others while
their mean time is above the target.  Whoever has a clock tells the deciding part, through the
journal.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvell.engine.protocol import Event, Finished, Tokens
from kvell.vocabulary import RequestId


@dataclass(frozen=True)
class Lateness:
    """Of one step: is any first token late, is any answer slow?"""

    ttft_late: bool
    tpot_late: bool


@dataclass
class _Seen:
    submitted: float
    first: float | None = None
    tokens: int = 0


class LatenessWatch:
    """Requests in flight, and when their tokens came.

    :param ttft_seconds: from submission to the first token, at most.
    :param tpot_seconds: between tokens, on average, at most.
    :param expected_tokens: an answer is taken to have at least so many: who waits after its first
        token may still keep to the mean.
    """

    def __init__(self, ttft_seconds: float, tpot_seconds: float, expected_tokens: int = 1) -> None:
        self._ttft_seconds, self._tpot_seconds = ttft_seconds, tpot_seconds
        self._expected_tokens = expected_tokens
        self._seen: dict[RequestId, _Seen] = {}

    def submitted(self, request_id: RequestId, now_seconds: float) -> None:
        """A request came."""
        self._seen[request_id] = _Seen(now_seconds)

    def step(self, events: Iterable[Event], now_seconds: float) -> Lateness:
        """A step's events are there."""
        for event in events:
            if isinstance(event, Tokens) and event.request_id in self._seen:
                seen = self._seen[event.request_id]
                seen.first = now_seconds if seen.first is None else seen.first
                seen.tokens += len(event.token_ids)
        late = Lateness(
            any(self._waits_too_long(seen, now_seconds) for seen in self._seen.values()),
            any(self._is_slow(seen, now_seconds) for seen in self._seen.values()),
        )
        for event in events:
            if isinstance(event, Finished):
                self._seen.pop(event.request_id, None)
        return late

    def _waits_too_long(self, seen: _Seen, now_seconds: float) -> bool:
        until = now_seconds if seen.first is None else seen.first
        is_new = seen.first is None or seen.tokens == 1
        return is_new and until - seen.submitted > self._ttft_seconds

    def _is_slow(self, seen: _Seen, now_seconds: float) -> bool:
        if seen.first is None:
            return False
        tokens = max(seen.tokens, self._expected_tokens)
        return now_seconds - seen.first > tokens * self._tpot_seconds
