"""The front without I/O: requests that wait, requests in flight, and the credits of instances.

::

    add ──► waiting ──routed──► in flight ──Finished──► gone
               │ ▲                  ├─ drop ──► Cancel sent, still in flight
               │ └── attempts left ─┴─ instance dies ──► error, gone
               └─ drop ──► gone

The real and the virtual front share this code.  Each input returns commands in order, each with its
instance.  Submissions that an input makes possible come last.
"""

import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from kvell.cluster.instance_load import InstanceLoad, pace_among
from kvell.cluster.placements import PREFILL
from kvell.cluster.prefix_directory import PrefixDirectory
from kvell.cluster.routed_request import InstanceDeath
from kvell.cluster.routing.policies import Router
from kvell.cluster.steering.relief import DEFAULT_RELIEF, Relief
from kvell.cluster.steering.steering import RoleChanger, Steering
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
from kvell.engine.requests.turns import TurnQueue, leaves_parts
from kvell.errors import ChangeSomething, TryLater
from kvell.front.request_log import LogEntry, RequestObserver
from kvell.front.routes import RequestTransfer, Routes, TransferTotals
from kvell.vocabulary import FinishReason, RequestId

IDLE_WAIT_SECONDS = 10.0
"""Longer waits are reported if no instance has a request, since no end can make room then."""

NO_TRANSFERS: Mapping[RequestTransfer, TransferTotals] = MappingProxyType({})

logger = logging.getLogger(__name__)


class IdleWait(NamedTuple):
    """Requests that wait while no instance has any.

    :param seconds: duration of this state.
    :param why: why the next request cannot be submitted.
    """

    requests: int
    seconds: float
    why: str


class Entries(NamedTuple):
    """Requests that have not ended.

    :param in_flight: requests that instances have, and ``waiting``; each oldest first.
    :param transfers: the moved requests and the pulls of ended requests so far.
    """

    in_flight: list[LogEntry]
    waiting: list[LogEntry]
    idle_wait: IdleWait | None = None
    transfers: Mapping[RequestTransfer, TransferTotals] = NO_TRANSFERS


class WaitingLine:
    """The queue of a front; requests that instances have are charged here for their tokens.

    A request that is longer than one instance's memory waits apart from the queue until others can
    lend what it needs, in turn with others of its kind.  So it delays no other request.

    :param routes: choose the instance of a request.
    :param observer: is notified of requests that wait though all instances are idle.
    :ivar idle_wait: a wait of ``IDLE_WAIT_SECONDS`` or more, as of the last look; else None.
    :ivar turns: the requests that do not wait apart, and all that instances have.
    :ivar may_lend: whether others may have memory by now for the requests that wait apart.
    """

    def __init__(self, routes: Routes, observer: RequestObserver | None = None) -> None:
        self._routes, self._observer = routes, observer
        self.idle_wait: IdleWait | None = None
        self._idle_since: float | None = None
        self.turns: TurnQueue[LogEntry] = TurnQueue()
        self._long: TurnQueue[LogEntry] = TurnQueue()
        self.may_lend = False

    def __len__(self) -> int:
        return len(self.turns.waiting) + len(self._long.waiting)

    def __iter__(self) -> Iterator[LogEntry]:
        yield from self.turns
        yield from self._long

    def get(self, request_id: RequestId) -> LogEntry | None:
        """Return the waiting request of an id; None if there is none."""
        return self.turns.waiting.get(request_id) or self._long.waiting.get(request_id)

    @property
    def awaits_memory(self) -> bool:
        return bool(self._long.waiting)

    def look(self, lines: Collection[InstanceLoad], now: float) -> None:
        """Detect requests that wait for long though no instance has any; called for heartbeats.

        Requests of other fronts count, since they may hold the memory.
        """
        had, self.idle_wait = self.idle_wait, None
        if not self or any(line.in_flight or line.running_requests for line in lines):
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        seconds = now - self._idle_since
        if seconds < IDLE_WAIT_SECONDS:
            return
        self.idle_wait = IdleWait(len(self), seconds, self._why(lines))
        if had is None:
            message = "%d requests are waiting although every instance is idle: %s"
            logger.warning(message, len(self), self.idle_wait.why)
            if self._observer is not None:
                self._observer.waits_idle()

    def _why(self, lines: Collection[InstanceLoad]) -> str:
        entry = next(iter(self))
        if not any(line.is_open for line in lines):
            return "no instance accepts any"
        if self._routes.placements.is_long(entry):
            problem = "is longer than one instance's memory, and no other lends what it needs"
            return f"one with a prompt of {entry.prompt_tokens} tokens {problem}"
        return f"no instance has room for one with a prompt of {entry.prompt_tokens} tokens"

    def has_place(self, tenant: str, most: int) -> bool:
        """Return whether a new request of a tenant may wait; retried requests take no place.

        :param most: requests of one tenant that may wait; other tenants find a part kept for
            them (:func:`.leaves_parts`).
        """
        waiting = self.turns.count_new()
        for name, count in self._long.count_new().items():
            waiting[name] = waiting.get(name, 0) + count
        return leaves_parts(waiting, tenant, 1, most)

    def put_back(self, entries: Sequence[LogEntry], *, behind_returned: bool = False) -> None:
        for line in (self.turns, self._long):
            returned = [entry for entry in entries if line.knows(entry)]
            line.put_back(returned, behind_returned=behind_returned)

    def going(
        self, open_lines: list[InstanceLoad], now: float
    ) -> Iterator[tuple[LogEntry, InstanceLoad]]:
        """Yield the requests that can be submitted now, in turn; submit each before the next.

        :param open_lines: lines that have room.
        """
        if self._long.waiting:
            yield from self._due_long(open_lines, now)
        aside: list[LogEntry] = []
        full_tenants: set[str] = set()
        while self.turns.waiting and open_lines:
            turn = _next_in_turn(self.turns, open_lines, full_tenants)
            if turn is None:
                break
            entry, lines = turn
            if self._routes.placements.is_long(entry):  # its tenant is charged among its kind
                self.may_lend |= not self._long.waiting
                self.turns.discard(entry)
                self._long.add(entry)
                yield from self._due_long(open_lines, now)
                continue
            line = self._routes.line_for(entry, lines, now)
            if line is not None:
                self._take(self.turns, entry)
                yield entry, line
                if not line.has_room:
                    open_lines.remove(line)
            elif entry.attempts.on_probation:  # it waits until another suspect is cleared
                self.turns.take(entry)
                aside.append(entry)
            else:
                break
        if aside:
            self.turns.put_back(aside)

    def _due_long(
        self, open_lines: list[InstanceLoad], now: float
    ) -> Iterator[tuple[LogEntry, InstanceLoad]]:
        full_tenants: set[str] = set()
        while self.may_lend and open_lines:
            turn = _next_in_turn(self._long, open_lines, full_tenants)
            if turn is None:
                return
            entry, lines = turn
            line = self._routes.line_for(entry, lines, now)
            if line is None:
                self.may_lend = False  # until something changes
                return
            self._take(self._long, entry)
            yield entry, line
            if not line.has_room:
                open_lines.remove(line)

    @staticmethod
    def _take(line: TurnQueue[LogEntry], entry: LogEntry) -> None:
        line.take(entry)
        line.charge(entry.request_id, entry.prompt_cost_tokens)

    def charge(self, entry: LogEntry, tokens: int) -> None:
        """Charge the party of a request for its tokens."""
        if not self.turns.charge(entry.request_id, tokens):
            self._long.charge(entry.request_id, tokens)

    def discard(self, entry: LogEntry) -> bool:
        """Forget a request, waiting or at an instance; return whether it waited."""
        waited = self.turns.discard(entry)
        return bool(self._long.discard(entry) if waited is None else waited)

    def clear(self) -> Iterable[LogEntry]:
        return [*self.turns.clear(), *self._long.clear()]


def _next_in_turn(
    queue: TurnQueue[LogEntry], open_lines: list[InstanceLoad], full_tenants: set[str]
) -> tuple[LogEntry, list[InstanceLoad]] | None:
    """Return the request of a queue whose turn it is, with the open lines that have room for its
    tenant; None if no tenant's request has room.

    :param full_tenants: tenants to pass over; those without room are added.
    """
    while (entry := queue.first(but=full_tenants)) is not None:
        tenant = entry.spec.tenant
        lines = [line for line in open_lines if not tenant or line.has_room_for(tenant)]
        if lines:
            return entry, lines
        full_tenants.add(tenant)
    return None


Command = Submit | Cancel | Migrate | MoveKvCache | WatchIndex
Commands = list[tuple[str, Command]]
"""Commands, each with its instance."""


class RequestQueue:
    """The request log, the bounded queue, and a line to every instance.

    After any input, :meth:`due` returns the submissions that it makes possible.

    :param max_waiting: requests of one tenant that may wait for a credit.
    :param router: chooses among the instances that have room.
    :param pulls: whether a request fetches its history from an instance that has more of it.
    :param locality: prefixes that instances cache, for a router that reads them.
    :param roles: changes the roles of instances by load; None: all keep theirs.
    :param steers: whether roles and moves are decided here; else the cluster's manager does.
    :param moves: the moves between instances while memory is short.
    :ivar role_changes: number of role changes so far.
    :ivar is_closing: whether no further request is submitted.
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
        self._in_flight: dict[RequestId, LogEntry] = {}
        """Requests that instances have, oldest first."""
        self._steering = Steering(roles, moves=moves) if steers else None
        self._short: set[str] = set()
        self.role_changes = 0
        self.is_closing = False
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
        in_flight, waiting = list(self._in_flight.values()), list(self._waiting)
        return Entries(in_flight, waiting, self._waiting.idle_wait, dict(self._routes.transfers))

    def line(self, instance_id: str) -> InstanceLoad:
        """Return the line to an instance; a new line is closed until it is opened."""
        if instance_id not in self.lines:
            self.lines[instance_id] = InstanceLoad(instance_id)
        return self.lines[instance_id]

    def open(
        self,
        instance_id: str,
        facts: InstanceFacts,
        *,
        joins_others: bool,
        watches: WatchIndex | None = None,
    ) -> list[tuple[str, WatchIndex]]:
        """Open the line to an incarnation of an instance (:meth:`.InstanceLoad.open`).

        :param watches: subscription for the instance, in place of the one that routing needs.
        :returns: commands to send first.
        """
        line = self.line(instance_id)
        line.open(facts, pace_among(facts, self.lines.values()), joins_others=joins_others)
        if self._locality is not None:
            self._locality.on_joined(instance_id, line.role, facts.indexed)
            watches = watches or WatchIndex(with_tokens=False)
        return [] if watches is None else [(instance_id, watches)]

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
        if len(self.lines) > 1:
            self.placements.check(entry)
        name, waiting = entry.request_id, self._waiting
        if name in self._in_flight or waiting.get(name) is not None:
            raise ChangeSomething("request_id", entry.shown_id, "is in use", "choose another")
        has_place = self._max_waiting > 0 and not waiting  # the common case
        if not (has_place or waiting.has_place(entry.spec.tenant, self._most_waiting())):
            if self._observer is not None:
                self._observer.on_rejected("max_waiting")
            raise TryLater(f"{len(waiting)} requests are waiting; retry in a moment")
        waiting.turns.add(entry)
        if entry.trace is not None:
            entry.trace.on_admitted()

    def due(self, now: float) -> list[tuple[str, Submit]]:
        """Return the submissions that can go out now, each with its instance, in turn.

        An instance has one request on probation at a time, so that a crash has one suspect.
        """
        if self.is_closing or not self._waiting:
            return []
        open_lines = [line for line in self.lines.values() if line.has_room]
        if not open_lines:  # called for every token while requests wait
            return []
        chosen: list[LogEntry] = []
        for entry, line in self._waiting.going(open_lines, now):
            line.pace.crowd.pass_to(now)
            line.add(entry)
            self._in_flight[entry.request_id] = entry
            if entry.submitted_seconds is None:
                entry.submitted_seconds = now
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

    def on_events(self, instance_id: str, events: Iterable[Event], now: float) -> Commands:
        """Handle events of an instance; return commands, and the submissions that are due now."""
        commands: Commands = []
        frees = has_report = False
        for event in events:
            if isinstance(event, Tokens):  # nearly all events
                self.tokens(event, now)
                frees = True  # a first token lets a new instance have more requests
                continue
            commands += self.on_event(instance_id, event, now)
            frees = frees or isinstance(event, Finished)  # a credit is free again
            has_report = has_report or isinstance(event, Heartbeat)
        if (frees or (has_report and self.awaits_memory)) and self._waiting:
            commands += self.due(now)
        return commands

    def on_event(
        self, instance_id: str, event: Event, now: float
    ) -> list[tuple[str, Cancel | Migrate | MoveKvCache | WatchIndex]]:
        """Handle an event of an instance; return commands to instances."""
        if isinstance(event, Tokens):
            self.tokens(event, now)
        elif isinstance(event, Finished):
            return [*self.on_finished(event, now)]
        elif isinstance(event, Acknowledgement | PromptLogprobs | MigrationRefused):
            self.on_notice(event)
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
        self._waiting.may_lend = True
        self._waiting.look(self.lines.values(), now)
        is_short = self.lines[instance_id].needs_steering
        (self._short.add if is_short else self._short.discard)(instance_id)
        return self._steer(now)

    def on_notice(self, event: Acknowledgement | PromptLogprobs | MigrationRefused) -> None:
        """Handle news of a request; drop those of unknown requests and old attempts."""
        entry = self._in_flight.get(event.request_id)
        if entry is None or entry.attempt != event.attempt:
            return
        if isinstance(event, PromptLogprobs):
            entry.take_scores(event)
        elif isinstance(event, MigrationRefused):
            self._routes.set_target(entry, "")
        elif entry.trace is not None:
            entry.trace.on_accepted()

    def tokens(self, event: Tokens, now: float) -> None:
        """Pass new tokens to their reader; drop those of unknown requests and old attempts."""
        entry = self._in_flight.get(event.request_id)
        if entry is None or not (fresh := entry.take_tokens(event)):
            return
        count = len(fresh)
        self.lines[entry.line].on_tokens(entry, count, now)
        self._waiting.charge(entry, count)
        if self._observer is not None and entry.last_token_seconds is not None:
            self._observer.next_tokens(now - entry.last_token_seconds, count)
        elif self._observer is not None:
            seconds = now - entry.arrived_seconds
            self._observer.first_tokens(seconds, count, entry.prompt_tokens)
        if entry.first_token_seconds is None:
            entry.first_token_seconds = now
        entry.last_token_seconds = now
        if entry.early_end is not None and not entry.has_gap:
            self.on_finished(entry.early_end, now)

    def on_finished(self, event: Finished, now: float) -> list[tuple[str, Migrate]]:
        """Handle the end of a request at its instance; its credit is free.  Return commands.

        An instance that drains by itself (SIGTERM), or that got requests from others, may still be
        sent a request.  Its line closes, or pauses, and the request returns to the queue's head.
        """
        entry = self._in_flight.get(event.request_id)
        if entry is None or event.attempt != entry.attempt:
            return []
        if entry.early and entry.has_gap and event.reason in ("stop", "length"):
            entry.early_end = event  # tokens before it are on their way from another instance
            return []
        if event.pulled_bytes:
            self._routes.count_pull(entry, event.pulled_bytes)
        taker = self._routes.taker(entry) if event.reason == "moved" else None
        if taker is not None:
            self._routes.on_moved(entry, taker, event.moved_bytes)
            taker.pace.crowd.pass_to(now)
            self._take_back(entry, now)
            taker.add(entry)
            taker.on_tokens(entry, 0)
            return [] if taker.is_open else self.evacuate(taker.instance_id)
        if entry.goes_to:
            self._routes.set_target(entry, "")
        line = self.lines[entry.line]
        if event.embedding:  # the only sign that the prompt is computed
            line.on_tokens(entry, 0)
        if entry.placement:
            self.placements.on_ended(entry)
        del self._in_flight[entry.request_id]
        self._take_back(entry, now)
        self._waiting.may_lend = True
        if event.not_taken and not entry.is_dropped:
            line.took_none(event.not_taken)
        if (end := entry.end_with(event)) is not None:
            self._end(entry, end, now)
            return []
        entry.attempt += 1
        # The oldest request of a failed step is reported first, and stays first.
        self._waiting.put_back([entry], behind_returned=True)
        return []

    def _take_back(self, entry: LogEntry, now: float) -> None:
        line = self.lines[entry.line]
        line.pace.crowd.pass_to(now)
        line.remove(entry)

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
        lost = [self._in_flight.pop(entry.request_id) for entry in self.line(instance_id).lost()]
        if self._locality is not None:
            self._locality.lost(instance_id)
        for entry in self._in_flight.values():
            if entry.goes_to == instance_id:
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
        self.refuse_too_long(now)  # perhaps another one was given up since they were placed
        return commands

    def on_given_up(self, instance_id: str, now: float) -> Commands:
        """Let no request wait for an instance; end those that the others can never hold."""
        self.line(instance_id).will_serve = False
        self.refuse_too_long(now)
        commands: Commands = []
        for entry, problem in list(self.placements.outgrown(self._in_flight.values())):
            if not entry.is_dropped:
                entry.must_change = problem
                commands += [*self.drop(entry.request_id, "refused", now), *self.due(now)]
        return commands

    def leaving(self, instance_id: str, now: float) -> list[tuple[str, Migrate]]:
        line = self.line(instance_id)
        line.close()
        line.will_serve = False
        self.refuse_too_long(now)
        return self.evacuate(instance_id)

    def fail_waiting(self, message: str, now: float) -> None:
        for entry in self._waiting.clear():
            self._end(entry, entry.failure(message), now)

    def _most_waiting(self) -> int:
        return self._max_waiting + sum(line.free_credits for line in self.lines.values())

    def _end(self, entry: LogEntry, finished: Finished, now: float) -> None:
        self._waiting.discard(entry)
        if entry.prefix:
            finished = replace(finished, request_id=RequestId(entry.shown_id))
        entry.mailbox.finish(finished)
        record = entry.to_record(finished, now)
        for observer in (self._observer, entry.trace):
            if observer is not None:
                observer.on_ended(record)
