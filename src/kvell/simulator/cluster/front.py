"""The front in virtual time, with the real queue, log, lines and router; no sockets."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from kvell.cluster.routed_request import InstanceDeath
from kvell.engine.protocol.messages import Event, Finished, Tokens
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.engine.requests.plan import StepPlan
from kvell.errors import ChangeSomething, TryLater
from kvell.front.request_log import EndedRequest, LogEntry
from kvell.front.request_queue import Command, RequestQueue
from kvell.simulator.cluster.loop import Loop
from kvell.simulator.replay.request_figures import RequestFigures
from kvell.simulator.replay.schedule import Schedule
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import RequestId

Tell = Callable[[str, Command], None]
"""Sender of a command to an instance."""

AHEAD_TOKENS = 1 << 23
"""Prompts are made shortly before admission: no more while this many tokens wait per instance …"""
AHEAD_REQUESTS = 17
"""… in at least this many requests: as many as one step can hold back, and one more."""


class VirtualFront:
    """A front that admits a trace's requests, and dispatches each to instances until it has ended.

    :param request_seconds: time that serving adds to each answer; see :class:`.StepTimer`.
    :param most_ahead: number of requests whose prompts may wait for admission; None: each prompt
        is made when it arrives.
    :ivar ends: the end of each admitted request, by index.
    :ivar outputs: the tokens that each request's client received, by index.
    """

    def __init__(
        self,
        queue: RequestQueue,
        rows: Sequence[TraceRow],
        prompts: PromptMaker,
        schedule: Schedule,
        loop: Loop,
        tell: Tell,
        request_seconds: float = 0.0,
        most_ahead: int | None = None,
    ) -> None:
        self.queue = queue
        self.requests = [
            RequestFigures(i, prompts.place(i).prompt_tokens) for i in range(len(rows))
        ]
        self.ends: dict[int, Finished] = {}
        self.outputs: dict[int, Sequence[int]] = {}
        self.moved = 0
        self._rows, self._prompts, self._schedule = rows, prompts, schedule
        self._loop, self._tell, self._request_seconds = loop, tell, request_seconds
        self._most_ahead = most_ahead
        self._ahead_requests = self._ahead_tokens = 0
        """Requests whose prompts are made, and that no instance has admitted; their tokens."""
        self._looks_at: float | None = None
        self._step = 0
        self._look_ahead()

    @property
    def holds_requests(self) -> bool:
        return self.queue.waiting > 0 or self._is_due()

    @property
    def num_arrived(self) -> int:
        due = self._schedule.num_due(self._loop.now_seconds)
        return due + self.queue.waiting + self.queue.in_flight

    @property
    def num_finished(self) -> int:
        return sum(figures.finish_seconds is not None for figures in self.requests)

    @property
    def num_done(self) -> int:
        return len(self.ends) + len(self._schedule.refused)

    def drop(self, index: int) -> None:
        """Cancel a request for its client; do nothing if it has not arrived or has ended."""
        now_seconds = self._loop.now_seconds
        cancels = self.queue.drop(RequestId(str(index)), "cancelled", now_seconds)
        self._tell_all([*cancels, *self.queue.due(now_seconds)])

    def migrate(self, index: int, target: str) -> None:
        with contextlib.suppress(ChangeSomething):
            self._tell_all(self.queue.migrate(RequestId(str(index)), target))

    def evacuate(self, instance_id: str) -> None:
        self._tell_all(self.queue.evacuate(instance_id))

    # ------------------------------------------------------------------ instances

    def ready(self, instance_id: str, facts: InstanceFacts, *, joins_others: bool) -> None:
        """Open the queue for an incarnation that serves; see :meth:`.RequestQueue.open`."""
        subscriptions = self.queue.open(instance_id, facts, joins_others=joins_others)
        self._tell_all([*subscriptions, *self.queue.due(self._loop.now_seconds)])

    def note_admitted(self, plan: StepPlan) -> None:
        """Note the requests that a step admits: the prompts of others are made."""
        for request_id in plan.admitted:
            figures = self.requests[int(request_id)]
            if figures.admitted_step is None:
                self._take_in(figures)
                figures.admitted_step = plan.step
        if plan.admitted:
            self._look_ahead()

    def on_events(self, instance_id: str, events: Sequence[Event], step: int = 0) -> None:
        now_seconds, self._step = self._loop.now_seconds, step
        for event in events:
            if isinstance(event, Tokens):
                figures = self.requests[int(event.request_id)]
                if event.first_index == 0 and figures.first_token_seconds is None:
                    figures.first_token_seconds = now_seconds + self._request_seconds
                    figures.first_token_step = step
            elif isinstance(event, Finished):
                self.moved += event.reason == "moved"
        self._tell_all(self.queue.on_events(instance_id, events, now_seconds))

    def lost(self, instance_id: str, death: InstanceDeath) -> None:
        now_seconds = self._loop.now_seconds
        cancels = self.queue.lost(instance_id, death, now_seconds)
        self._tell_all([*cancels, *self.queue.due(now_seconds)])

    # ------------------------------------------------------------------- requests

    def _look_ahead(self) -> None:
        at_seconds = self._schedule.next_seconds()
        if at_seconds is None or self._is_far_ahead():
            return
        if self._looks_at is not None and self._looks_at <= at_seconds:
            return
        self._looks_at = at_seconds
        self._loop.at(at_seconds, partial(self._arrive, at_seconds))

    def _arrive(self, looked_at: float) -> None:
        if self._looks_at != looked_at:
            return  # an earlier request was scheduled since
        self._looks_at = None
        while self._is_due() and not self._is_far_ahead():
            self._submit(self._schedule.pop())
        self._tell_all(self.queue.due(self._loop.now_seconds))
        self._look_ahead()

    def _is_due(self) -> bool:
        at_seconds = self._schedule.next_seconds()
        return at_seconds is not None and at_seconds <= self._loop.now_seconds

    def _is_far_ahead(self) -> bool:
        """Return whether more prompts are made than the instances can admit soon.

        The prompts of a whole trace may not fit into memory.
        """
        waiting = self._ahead_requests
        count = len(self.queue.lines)
        if self._most_ahead is None or waiting < AHEAD_REQUESTS * count:
            return False
        return waiting > self._most_ahead or self._ahead_tokens > AHEAD_TOKENS * count

    def _take_in(self, figures: RequestFigures) -> None:
        self._ahead_requests -= 1
        self._ahead_tokens -= figures.prompt_tokens

    def _submit(self, index: int) -> None:
        row, figures = self._rows[index], self.requests[index]
        figures.came_seconds = came_seconds = self._schedule.came_seconds(index)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=row.output_tokens,
            ignore_eos=True,
            will_return=row.will_return,
        )
        prompt = to_token_bytes(self._prompts.prompt(index))
        name = RequestId(str(index))
        images = self._prompts.place(index).images
        spec = RequestSpec(name, prompt, sampling, images=images, session=row.session or "")
        entry = LogEntry(spec, came_seconds)
        entry.trace = _Trace(partial(self._ended, index, entry))
        try:
            self.queue.add(entry)
        except TryLater:
            self._schedule.refuse(index, self._loop.now_seconds)
            return
        self._ahead_requests += 1
        self._ahead_tokens += figures.prompt_tokens

    def _ended(self, index: int, entry: LogEntry, ended: EndedRequest) -> None:
        self.ends[index], self.outputs[index] = ended.finished, entry.output
        figures = self.requests[index]
        now_seconds = self._loop.now_seconds
        if ended.finished.reason in ("stop", "length"):
            figures.hit_tokens = ended.finished.cached_tokens
            figures.finish_step = self._step
            figures.finish_seconds = now_seconds + self._request_seconds
        if figures.admitted_step is None:
            self._take_in(figures)
        entry.trace = None  # which would keep the prompt until the next collection of cycles
        self._schedule.on_ended(index, now_seconds)
        self._look_ahead()

    def _tell_all(self, commands: Sequence[tuple[str, Command]]) -> None:
        for instance_id, command in commands:
            self._tell(instance_id, command)


class _Trace:
    def __init__(self, on_ended: Callable[[EndedRequest], None]) -> None:
        self.on_ended = on_ended

    def on_admitted(self) -> None:
        """Do nothing."""

    def on_accepted(self) -> None:
        """Do nothing."""
