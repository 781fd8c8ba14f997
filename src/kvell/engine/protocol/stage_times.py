"""Times that requests wait, prefill and decode in an instance, by the loop's clock.

::

    submitted ──queue──► first admitted ──prefill──► first token ──decode──► ended

A preemption does not end a stage, as in vLLM.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvell.clock import Clock
from kvell.engine.protocol.messages import Event, Finished, Tokens
from kvell.vocabulary import RequestId


@dataclass
class _Stages:
    submitted_seconds: float
    admitted_seconds: float | None = None
    first_token_seconds: float | None = None

    def add_times(self, finished: Finished, now: float) -> Finished:
        admitted = now if self.admitted_seconds is None else self.admitted_seconds
        first = now if self.first_token_seconds is None else self.first_token_seconds
        return replace(
            finished,
            queue_seconds=admitted - self.submitted_seconds,
            prefill_seconds=first - admitted,
            decode_seconds=now - first,
        )


class StageTimes:
    """A stopwatch for requests, driven by the commands and events of a core."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stages: dict[RequestId, _Stages] = {}
        self._without_token = 0

    def on_submitted(self, request_id: RequestId) -> None:
        """Note a submitted request; a request in flight keeps its time."""
        if request_id not in self._stages:
            self._stages[request_id] = _Stages(self._clock.now_seconds())
            self._without_token += 1

    def on_admitted(self, request_ids: Iterable[RequestId]) -> None:
        """Note requests admitted by the step that begins now; only the first admission counts."""
        now = self._clock.now_seconds()
        for request_id in request_ids:
            stages = self._stages.get(request_id)
            if stages is not None and stages.admitted_seconds is None:
                stages.admitted_seconds = now

    def add_times(self, events: list[Event]) -> list[Event]:
        if not self._without_token and not any(type(event) is Finished for event in events):
            return events
        now = self._clock.now_seconds()
        return [self._told(event, now) for event in events]

    def _told(self, event: Event, now: float) -> Event:
        if isinstance(event, Tokens):
            stages = self._stages.get(event.request_id)
            if stages is not None and stages.first_token_seconds is None:
                stages.first_token_seconds = now
                self._without_token -= 1
        elif isinstance(event, Finished):
            stages = self._stages.pop(event.request_id, None)
            if stages is None:
                return event
            self._without_token -= stages.first_token_seconds is None
            return stages.add_times(event, now)
        return event
