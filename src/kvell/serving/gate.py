"""Credits and draining around an engine; no I/O."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvell.cluster.steering.epochs import HighestEpoch
from kvell.engine.protocol.messages import (
    Cancel,
    Command,
    Drain,
    Drained,
    Event,
    Finished,
    Introduce,
    KeepAlive,
    Lead,
    Led,
    OtherFronts,
    Ready,
    Submit,
    Tokens,
)
from kvell.engine.protocol.statistics import LoadStats
from kvell.vocabulary import RequestId

NAME_END = ":"
"""The separator after the front's name in a request's id, if there are several fronts."""


class Engine(Protocol):
    """The interface of an engine for the loop, which calls it from one thread."""

    def ready(self) -> Ready:
        """Return the models, limits and credits of this engine."""
        ...

    def handle(self, command: Command) -> list[Event]:
        """Handle a command, and return the events that need no step."""
        ...

    def has_work(self) -> bool:
        """Return whether :meth:`step` would do anything."""
        ...

    def has_requests(self) -> bool:
        """Return whether a request has not ended, including requests that need no step now."""
        ...

    def step(self) -> list[Event]:
        """Plan, run and commit one step."""
        ...

    def wakes(self) -> int | None:
        """Return a descriptor that becomes readable when :meth:`woken` has events; None: never."""
        ...

    def woken(self) -> list[Event]:
        """Process what other instances or threads have sent, and return its events."""
        ...

    def pulse(self) -> LoadStats:
        """Return the load now.  Called only when a heartbeat is due."""
        ...


def front_of(request_id: RequestId) -> str:
    return request_id.partition(NAME_END)[0]


@dataclass
class _Share:
    """The requests of one front, each with its prompt tokens (0 once it has an answer).

    :ivar came: requests that another instance handed over; the front may not know it yet.
    :ivar ending: requests that were cancelled when the front disconnected, and have not ended.
    :ivar again: those of them that the front has submitted again since it reconnected.
    """

    pending_tokens: dict[RequestId, int] = field(default_factory=dict)
    sum_tokens: int = 0
    came: set[RequestId] = field(default_factory=set)
    ending: set[RequestId] = field(default_factory=set)
    again: dict[RequestId, Submit] = field(default_factory=dict)

    def began(self, request_id: RequestId) -> None:
        """Note that a request has tokens: its prompt is computed, maybe by another instance."""
        if request_id not in self.pending_tokens:
            self.came.add(request_id)
        self.sum_tokens -= self.pending_tokens.get(request_id, 0)
        self.pending_tokens[request_id] = 0

    def on_ended(self, request_id: RequestId) -> None:
        self.sum_tokens -= self.pending_tokens.pop(request_id, 0)
        self.came.discard(request_id)


class CommandGate:
    """Enforcement of credits and draining for an engine; each front has the full credits."""

    def __init__(self, engine: Engine, owner: Callable[[RequestId], str]) -> None:
        self._engine, self._owner = engine, owner
        self._shares: dict[str, _Share] = {}
        self._draining = False
        self._epochs = HighestEpoch()
        self.ready = engine.ready()
        self.drained = False
        self.has_work, self.has_requests = engine.has_work, engine.has_requests
        self.wakes = engine.wakes

    def accept(self, command: Command, front: str = "") -> list[Event]:
        """Pass a front's command to the engine, or refuse it; return the immediate answers."""
        if isinstance(command, KeepAlive):
            return []
        if isinstance(command, Submit):
            return self._submit(command, front)
        if isinstance(command, Lead | Drain | Introduce) and (front or isinstance(command, Lead)):
            outranking = self._epochs.outranking(command.epoch, front)
            if outranking or isinstance(command, Lead):
                return [Led(outranking or command.epoch)]
        if isinstance(command, Drain):
            if self._draining:
                return []
            self._draining = True
        return self._after(self._engine.handle(command))

    def advance(self) -> list[Event]:
        return self._after(self._engine.step())

    def woken(self) -> list[Event]:
        return self._after(self._engine.woken())

    def others(self, front: str) -> OtherFronts:
        others = [share for name, share in self._shares.items() if name != front]
        return OtherFronts(
            sum(share.sum_tokens for share in others),
            sum(len(share.pending_tokens) for share in others),
        )

    def cancel_all(self) -> None:
        for front in list(self._shares):
            self.cancel_of(front)

    def cancel_of(self, front: str) -> list[Event]:
        """Cancel all requests of a front that has disconnected; it may connect again."""
        share = self._shares.get(front)
        if share is None:
            return []
        share.again.clear()
        share.ending |= share.pending_tokens.keys()
        events: list[Event] = []
        for request_id in sorted(share.pending_tokens):
            events += self._after(self._engine.handle(Cancel(request_id)))
        return events

    def cancel(self, request_id: RequestId) -> list[Event]:
        return self._after(self._engine.handle(Cancel(request_id)))

    def _submit(self, command: Submit, front: str) -> list[Event]:
        if self._draining:
            refusal = _refusal(command, "the instance is draining")
            return [replace(refusal, not_taken="draining")]
        if self._owner(command.request_id) != front:
            return [_refusal(command, f"the request's id must begin with {front}{NAME_END}")]
        share = self._shares.setdefault(front, _Share())
        if command.request_id in share.ending - share.again.keys():
            share.again[command.request_id] = command
            return []
        if command.request_id in share.pending_tokens:
            return [_refusal(command, "a request with this id is in flight")]
        if len(share.pending_tokens) >= self.ready.facts.credits:
            refusal = _refusal(command, f"all {self.ready.facts.credits} credits are in use")
            return [replace(refusal, not_taken="full" if share.came else "")]
        tokens = command.spec.prompt_tokens
        share.pending_tokens[command.request_id] = tokens
        share.sum_tokens += tokens
        return self._after(self._engine.handle(command))

    def _after(self, events: Iterable[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            # Drained ends the process: the engine's event is dropped, and one is sent below.
            if not isinstance(event, Drained):
                kept.append(event)
            if isinstance(event, Finished):
                kept += self._finished(event.request_id)
            elif isinstance(event, Tokens):
                front = self._owner(event.request_id)
                self._shares.setdefault(front, _Share()).began(event.request_id)
        if self._draining and not self.drained and not self._shares:
            self.drained = not self._engine.has_requests()
            kept += [Drained()] if self.drained else []
        return kept

    def _finished(self, request_id: RequestId) -> list[Event]:
        front = self._owner(request_id)
        share = self._shares.get(front)
        if share is None:
            return []
        share.on_ended(request_id)
        share.ending.discard(request_id)
        again = share.again.pop(request_id, None)
        if not share.pending_tokens and again is None:
            del self._shares[front]
        return [] if again is None else self._submit(again, front)


def _refusal(command: Submit, why: str) -> Finished:
    return Finished(command.request_id, command.attempt, "refused", message=why, try_later=True)


def lone_owner(_request_id: RequestId) -> str:
    return LONE


LONE = ""
"""The name of a front that is alone."""
