"""The front without I/O: requests that wait, requests in flight, and the credits of instances.

::

    add ──► waiting ──routed──► in flight ──Finished──► gone
               │ ▲                  ├─ drop ──► Cancel sent, still in flight
               │ └── attempts left ─┴─ instance dies ──► error, gone
               └─ drop ──► gone
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from kvell.cluster.prefix_directory import PrefixDirectory
from kvell.cluster.routing.policies import Router
from kvell.cluster.steering.relief import DEFAULT_RELIEF, Relief
from kvell.cluster.steering.roles import RoleChanger
from kvell.cluster.steering.steering import Steering
from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import (
    Acknowledgement,
    Cancel,
    Event,
    Finished,
    Heartbeat,
    Migrate,
    MigrationRefused,
    MoveKvCache,
    Submit,
    Tokens,
)
from kvell.engine.protocol.notices import IndexNotice, WatchIndex
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import ChangeSomething, TryLater
from kvell.fleet.instance.death import InstanceDeath
from kvell.front.in_flight import InFlight
from kvell.front.instance_load import InstanceLoad, pace_among
from kvell.front.placements import PREFILL
from kvell.front.request_log import LogEntry, RequestObserver
from kvell.front.routes import Routes
from kvell.front.waiting_line import Entries, WaitingLine
from kvell.vocabulary import FinishReason, RequestId


class RequestQueue:
    """The request log, the bounded queue, and a line to every instance.

    :param max_waiting: requests of one tenant that may wait for a credit.
    :param router: chooses among the instances that have room.
    :param pulls: whether a request fetches its history from an instance that has more of it.
    :param locality: prefixes that instances cache, for a router that reads them.
    :param roles: changes the roles of instances by load; None: all keep theirs.
    :param steers: whether roles and moves are decided here; else the cluster's manager does.
    :param moves: the moves between instances while memory is short.
    :ivar role_changes: number of role changes so far.
    """

    def __init__(
        self,
        max_waiting: int,
        observer: RequestObserver | None = None,
        router: Router | None = None,
        *,
        pulls: bool = True,
        locality: PrefixDirectory | None = None,
        roles: RoleChanger | None = None,
        steers: bool = True,
        moves: Relief = DEFAULT_RELIEF,
    ) -> None:
        self._max_waiting, self._observer, self._locality = max_waiting, observer, locality
        self.lines: dict[str, InstanceLoad] = {}
        self._in_flight = InFlight(self.lines)
        self._steering = Steering(roles, moves=moves) if steers else None
        self._short: set[str] = set()
        self.role_changes = 0
        self._routes = Routes(self.lines, router, pulls=pulls, locality=locality, moves=moves)
        self._waiting = WaitingLine(self._routes, observer)
        self.placements = self._routes.placements

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def awaits_memory(self) -> bool:
        return self._waiting.awaits_memory

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def room(self) -> int:
        return max(0, self._most_waiting() - len(self._waiting))

    def entries(self) -> Entries:
        in_flight, waiting = list(self._in_flight), list(self._waiting)
        return Entries(in_flight, waiting, self._waiting.idle_wait, dict(self._routes.transfers))

    def line(self, instance_id: str) -> InstanceLoad:
        """Return the line to an instance; a new line is closed until it is opened."""
        if instance_id not in self.lines:
            self.lines[instance_id] = InstanceLoad(instance_id)
        return self.lines[instance_id]

    def open(
        self, instance_id: str, facts: InstanceFacts, *, joins_others: bool
    ) -> list[tuple[str, WatchIndex]]:
        """Open the line to an incarnation of an instance (:meth:`.InstanceLoad.open`).

        :returns: commands to send first.
        """
        line = self.line(instance_id)
        line.open(facts, pace_among(facts, self.lines.values()), joins_others=joins_others)
        if self._locality is None:
            return []
        self._locality.on_joined(instance_id, line.role, facts.indexed)
        return [(instance_id, WatchIndex(with_tokens=False))]

    def refuse_too_long(self, now: float) -> None:
        for entry, problem in list(self.placements.too_long(self._waiting)):
            self._end(entry, entry.refusal(problem), now)

    def remove_line(self, instance_id: str) -> None:
        line = self.lines.pop(instance_id)
        self._short.discard(instance_id)
        assert not line.in_flight, "its requests would be forgotten"
        if self._locality is not None:
            self._locality.lost(instance_id)

    def add(self, entry: LogEntry) -> None:
        """Add a request to the queue.

        :raises TryLater: when the queue is full.
        :raises ChangeSomething: when the id is already in use, or the prompt is too long.
        """
        self.placements.check(entry)
        name = entry.request_id
        if name in self._in_flight or self._waiting.get(name) is not None:
            raise ChangeSomething("request_id", entry.shown_id, "is in use", "choose another")
        if not self._waiting.has_place(entry.spec.tenant, self._most_waiting()):
            if self._observer is not None:
                self._observer.on_rejected("max_waiting")
            raise TryLater(f"{len(self._waiting)} requests are waiting; retry in a moment")
        self._waiting.add(entry)
        if entry.trace is not None:
            entry.trace.on_admitted()

    def due(self, now: float) -> list[tuple[str, Submit]]:
        """Return the submissions that can go out now, each with its instance, in turn.

        An instance has one request on probation at a time, so that a crash has one suspect.
        """
        if not self._waiting:
            return []
        open_lines = [line for line in self.lines.values() if line.has_room]
        if not open_lines:  # called for every token while requests wait
            return []
        chosen: list[LogEntry] = []
        for entry, line in self._waiting.going(open_lines, now):
            self._in_flight.submit(entry, line, now)
            chosen.append(entry)
        return [(entry.line, entry.submission()) for entry in chosen]

    def drop(
        self, request_id: RequestId, end_as: FinishReason, now: float
    ) -> list[tuple[str, Cancel]]:
        """End a request early; return commands to instances."""
        if (waiting := self._waiting.get(request_id)) is not None:
            self._end(waiting, Finished(request_id, waiting.attempt, end_as), now)
        entry = self._in_flight.get(request_id)
        if entry is None or entry.end_as != "cancelled":
            return []
        entry.end_as = end_as
        entry.is_dropped = True
        targets = [entry.line, *([entry.goes_to] if entry.goes_to else [])]
        return [(target, Cancel(request_id, entry.attempt)) for target in targets]

    def on_event(
        self, instance_id: str, event: Event, now: float
    ) -> list[tuple[str, Cancel | Migrate | MoveKvCache | WatchIndex]]:
        """Handle an event of an instance; return commands to instances."""
        if isinstance(event, Tokens):
            self.tokens(event, now)
        elif isinstance(event, Finished):
            return [*self.on_finished(event, now)]
        elif isinstance(event, Acknowledgement):
            self.note_acceptance(event)
        elif isinstance(event, PromptLogprobs):
            self.on_scores(event)
        elif isinstance(event, MigrationRefused):
            self.stays(event)
        elif isinstance(event, Heartbeat):
            self.line(instance_id).on_heartbeat(event)
            return [*self.on_report(instance_id, now)]
        elif isinstance(event, IndexNotice) and self._locality is not None:
            incarnation = self.line(instance_id).incarnation
            if not self._locality.on_notice(instance_id, incarnation, event, now):
                return [(instance_id, WatchIndex(with_tokens=False))]
        return []

    def on_report(self, instance_id: str, now: float) -> list[tuple[str, Migrate | MoveKvCache]]:
        """Decide after the line to an instance has its heartbeat; return commands to instances."""
        self._waiting.note_memory()
        self._waiting.look(self.lines.values(), now)
        is_short = self.lines[instance_id].needs_steering
        (self._short.add if is_short else self._short.discard)(instance_id)
        return self._steer(now)

    def note_acceptance(self, event: Acknowledgement) -> None:
        entry = self._in_flight.get(event.request_id)
        if entry is not None and entry.trace is not None and entry.attempt == event.attempt:
            entry.trace.on_accepted()

    def tokens(self, event: Tokens, now: float) -> None:
        """Pass new tokens to their reader; drop those of unknown requests and old attempts."""
        entry = self._in_flight.get(event.request_id)
        fresh = entry.take_tokens(event) if entry else ()
        if entry is None or not fresh:
            return
        count = len(fresh)
        self.lines[entry.line].on_tokens(entry, count, now)
        self._waiting.charge(entry, count)
        if self._observer is not None and entry.last_token_seconds is not None:
            self._observer.next_tokens(now - entry.last_token_seconds, count)
        elif self._observer is not None:
            seconds = now - entry.arrived_seconds
            self._observer.first_tokens(seconds, count, entry.prompt_tokens)
        entry.note_tokens(now)
        if entry.early_end is not None and not entry.has_gap:
            self.on_finished(entry.early_end, now)

    def on_scores(self, event: PromptLogprobs) -> None:
        """Pass on a prompt's log probabilities; drop those of unknown requests and old attempts."""
        if (entry := self._in_flight.get(event.request_id)) is not None:
            entry.take_scores(event)

    def on_finished(self, event: Finished, now: float) -> list[tuple[str, Migrate]]:
        """Handle the end of a request at its instance; its credit is free.  Return commands.

        An instance that drains by itself (SIGTERM), or that got requests from others, may still be
        sent a request.  Its line closes, or pauses, and the request returns to the queue's head.
        """
        entry = self._in_flight.get(event.request_id)
        if entry is None or event.attempt != entry.attempt:
            return []
        if entry.has_gap and event.reason in ("stop", "length"):
            entry.early_end = event  # tokens before it are on their way from another instance
            return []
        self._routes.count_pull(entry, event.pulled_bytes)
        taker = self._routes.taker(entry) if event.reason == "moved" else None
        if taker is not None:
            self._routes.on_moved(entry, taker, event.moved_bytes)
            self._in_flight.hand_over(entry, taker, now)
            return [] if taker.is_open else self.evacuate(taker.instance_id)
        self._routes.set_target(entry, "")
        line = self._in_flight.line_of(entry)
        if event.embedding:  # the only sign that the prompt is computed
            line.on_tokens(entry, 0)
        self.placements.on_ended(entry)
        self._in_flight.take_back(entry, now)
        self._waiting.note_memory()
        if event.not_taken and not entry.is_dropped:
            line.took_none(event.not_taken)
        if (end := entry.end_with(event)) is not None:
            self._end(entry, end, now)
            return []
        entry.attempt += 1
        # The oldest request of a failed step is reported first, and stays first.
        self._waiting.put_back([entry], behind_returned=True)
        return []

    def evacuate(self, instance_id: str) -> list[tuple[str, Migrate]]:
        """Let others continue the requests of an instance; return commands to it.

        Requests that cannot move, or find no room elsewhere, stay.
        """
        others = {line.instance_id: 0 for line in self._routes.takers(instance_id)}
        commands: list[tuple[str, Migrate]] = []
        for entry in self.line(instance_id).in_flight.values():
            if entry.goes_to or entry.is_dropped or not others:
                continue
            fewest = min(others.values())
            lines = [self.lines[name] for name, count in others.items() if count == fewest]
            target = self._routes.target(entry, lines)
            if target:
                others[target] += 1
                commands += self.migrate(entry.request_id, target)
        return commands

    def migrate(self, request_id: RequestId, target: str) -> list[tuple[str, Migrate]]:
        """Let another instance continue a request; return commands to the one that has it.

        :raises ChangeSomething: if no instance has the request, or the other takes none.
        """
        entry, line = self._in_flight.get(request_id), self.lines.get(target)
        if entry is None:
            raise ChangeSomething("request_id", request_id, "is not served now", "choose another")
        if line is None or not line.is_open or entry.line == target:
            problem = "accepts no requests, or has this one"
            raise ChangeSomething("instance_id", target, problem, "choose another")
        if entry.goes_to:
            return []  # it moves already
        self._routes.set_target(entry, target, is_migration=True)
        return [(entry.line, Migrate(request_id, entry.attempt, target))]

    def stays(self, event: MigrationRefused) -> None:
        entry = self._in_flight.get(event.request_id)
        if entry is not None and entry.attempt == event.attempt:
            self._routes.set_target(entry, "")

    def _steer(self, now: float) -> list[tuple[str, Migrate | MoveKvCache]]:
        """Decide on roles and moves, once a second; return commands to instances."""
        steering = self._steering
        # A heartbeat costs the same, however many instances there are.
        is_needed = steering is not None and (self._short or steering.changes_roles)
        if steering is None or not is_needed or not steering.is_due(now):
            return []
        open_lines = [line for line in self.lines.values() if line.is_open]
        orders = steering.decide(
            open_lines, lambda instance_id: self.lines[instance_id].movable(), now
        )
        moved = (self.move(move.request_id, move.target, move.num_blocks) for move in orders.moves)
        return [*self.set_roles(orders.roles), *itertools.chain.from_iterable(moved)]

    def move(
        self, request_id: str, target: str, num_blocks: int = 0
    ) -> list[tuple[str, Migrate | MoveKvCache]]:
        """Carry out a move; do nothing if the request or the instance has ended meanwhile.

        :param num_blocks: 0: move the whole request; else lend this number of its sections.
        """
        name = RequestId(request_id)
        entry = self._in_flight.get(name)
        if num_blocks:
            if entry is None or entry.goes_to or entry.line == target or target not in self.lines:
                return []
            return [(entry.line, MoveKvCache(name, entry.attempt, num_blocks, target))]
        try:
            return [*self.migrate(name, target)]
        except ChangeSomething:
            return []

    def set_roles(self, roles: Sequence[tuple[str, str]]) -> list[tuple[str, Migrate]]:
        """Give instances roles, all together; the requests of new prefill instances move away."""
        changing = [(name, role) for name, role in roles if self.line(name).role != role]
        for name, role in changing:
            self.line(name).role = role
        self.role_changes += len(changing)
        emptied = [name for name, role in changing if role == PREFILL]
        return [command for name in emptied for command in self.evacuate(name)]

    def lost(self, instance_id: str, death: InstanceDeath, now: float) -> list[tuple[str, Cancel]]:
        """Take back the requests of a dead instance: to the queue's head, or to an end.

        The next attempt continues after the emitted tokens.  Return commands to other instances
        that requests were moving to.
        """
        lost = self._in_flight.take_back_all(self.line(instance_id))
        if self._locality is not None:
            self._locality.lost(instance_id)
        for entry in self._in_flight.going_to(instance_id):
            self._routes.set_target(entry, "")  # it stays where it is
        again: list[LogEntry] = []
        commands: list[tuple[str, Cancel]] = []
        for entry in lost:
            if entry.goes_to:
                commands.append((entry.goes_to, Cancel(entry.request_id, entry.attempt)))
                self._routes.set_target(entry, "")
            if (end := entry.end_after(death, sole=len(lost) == 1)) is None:
                entry.attempt += 1
                again.append(entry)
            else:
                self._end(entry, end, now)
        self._waiting.put_back(again)
        return commands

    def fail_waiting(self, message: str, now: float) -> None:
        for entry in self._waiting.clear():
            self._end(entry, entry.failure(message), now)

    def _most_waiting(self) -> int:
        return self._max_waiting + sum(line.free_credits for line in self.lines.values())

    def _end(self, entry: LogEntry, finished: Finished, now: float) -> None:
        self._waiting.discard(entry)
        finished = replace(finished, request_id=RequestId(entry.shown_id))
        entry.mailbox.finish(finished)
        for observer in (self._observer, entry.trace):
            if observer is not None:
                observer.on_ended(entry.to_record(finished, now))
