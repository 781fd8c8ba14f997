"""Lateness of requests after each step: the input of eLLM's Algorithm 2.

A first token is late while it is overdue.  Later tokens are late while their mean time is above the
target.  The mean is taken over the usual length of answers, so a request that pauses after its
first token may still meet the target.  The engine, which has a clock, reports lateness to its core
through the journal.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvell.engine.protocol.messages import Event, Finished, Tokens
from kvell.vocabulary import RequestId

EARLY_TTFT, EARLY_TPOT = 0.08, 0.7
"""Fractions of the objectives at which Algorithm 2 calls a request late.  TTFT: with an objective
of 25 times the TTFT of a lone request, 0.08 is twice that TTFT, so any request that waits at all
is late; a larger buffer costs nothing while no answer is slow.  TPOT: 0.7, to stop before the
objective is missed."""


@dataclass(frozen=True)
class Lateness:
    """Whether, after one step, any first token is late and any answer is slow."""

    ttft_late: bool
    tpot_late: bool


@dataclass
class _Answer:
    first: float
    tokens: int = 0


class LatenessWatch:
    """The requests in flight, and the times of their tokens.

    :param ttft_seconds: longest time from submission to the first token.
    :param tpot_seconds: longest mean time between tokens.
    :param expected_tokens: length of an answer until an answer ends, raised to that of the longest
        answer so far; then the mean length of ended answers is used.
    """

    def __init__(self, ttft_seconds: float, tpot_seconds: float, expected_tokens: int = 1) -> None:
        self._ttft_seconds, self._tpot_seconds = ttft_seconds, tpot_seconds
        self._expected_tokens = expected_tokens
        self._ended = self._ended_tokens = 0
        self._waiting: dict[RequestId, float] = {}
        self._answers: dict[RequestId, _Answer] = {}

    @classmethod
    def ahead_of(
        cls, ttft_seconds: float, tpot_seconds: float, expected_tokens: int = 1
    ) -> "LatenessWatch":
        return cls(EARLY_TTFT * ttft_seconds, EARLY_TPOT * tpot_seconds, expected_tokens)

    def on_submitted(self, request_id: RequestId, now_seconds: float) -> None:
        self._waiting[request_id] = now_seconds

    def step(self, events: Iterable[Event], now_seconds: float) -> Lateness:
        oldest = min(self._waiting.values(), default=now_seconds)
        for event in events:
            if type(event) is Tokens:
                self._came(event.request_id, len(event.token_ids), now_seconds)
        usual = self._ended_tokens / self._ended if self._ended else self._expected_tokens
        is_any_slow = any(
            now_seconds - answer.first > max(answer.tokens, usual) * self._tpot_seconds
            for answer in self._answers.values()
        )
        late = Lateness(now_seconds - oldest > self._ttft_seconds, is_any_slow)
        for event in events:
            if type(event) is Finished:
                self._waiting.pop(event.request_id, None)
                answer = self._answers.pop(event.request_id, None)
                if answer is not None:
                    self._ended += 1
                    self._ended_tokens += answer.tokens
        return late

    def _came(self, request_id: RequestId, count: int, now_seconds: float) -> None:
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._answers[request_id] = _Answer(now_seconds)
        answer = self._answers.get(request_id)
        if answer is not None:
            answer.tokens += count
            self._expected_tokens = max(self._expected_tokens, answer.tokens)
