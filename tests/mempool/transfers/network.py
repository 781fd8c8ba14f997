"""Instances, messages and copies that a test moves step by step."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvell.memory import GroupKind, GroupSpec, audit, create_core
from kvell.mempool.agent import Agent
from kvell.mempool.entries import Heard, PeerLost, PullEnded, Ticked
from kvell.mempool.owners import Owner
from kvell.mempool.transfers.actions import (
    Action,
    Arrived,
    Ended,
    Fetched,
    Grant,
    Pull,
    PullRest,
    Revoke,
    Send,
    StopPull,
)
from kvell.mempool.transfers.messages import PeerMessage, Transfer, Written
from kvell.mempool.transfers.receiving import owner_of
from kvell.pages.stages import BY_LAYER
from tests.mempool.agent_audit import audit_holds
from tests.pages.pools import pool_of

Label = tuple[int, ...]
"""What a page holds: its position, and the tokens that its content depends on."""
STAGES = 3
"""Of layers, in which a pass writes pages."""


def ints(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)


def label(spec: GroupSpec, position: int, tokens: Sequence[int]) -> Label:
    if spec.kind is GroupKind.STATE:
        return (position, *tokens)
    return (position, *tokens[: (position + 1) * spec.page_tokens])


WHOLE = STAGES


@dataclass
class Copying:
    """A pull under way: group, page, own page and stage (WHOLE: all of it) still to be copied."""

    pull: Pull
    left: list[list[int]]
    is_whole: bool
    is_stopped: bool = False

    @classmethod
    def of(cls, pull: Pull, groups: Sequence[GroupSpec]) -> "Copying":
        def stages(group: int) -> Sequence[int]:
            by_layer = pull.stages and groups[group].kind in BY_LAYER
            return range(pull.stages) if by_layer else (WHOLE,)

        left = [[*row, stage] for row in pull.rows.tolist() for stage in stages(row[0])]
        return cls(pull, left, not pull.stages)


@dataclass
class Pass:
    """A text that is being computed; its pages are held.

    :ivar rows: group, position and page of what is computed.
    :ivar num_written: of its stages.
    """

    target: str
    owner: Owner
    tokens: list[int]
    rows: list[list[int]]
    num_written: int = 0
    is_early: bool = False


class Instance:
    """One incarnation: its pages, what is in them, and both sides of its transfers."""

    def __init__(self, name: str, incarnation: int, groups: list[GroupSpec], large: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.core = create_core(pool_of(large, *groups))
        self.agent = Agent(self.core, name, incarnation, "float32", most_transfers=6)
        self.holds, self.sending = self.agent.holds, self.agent.sending
        self.receiving = self.agent.receiving
        self.owners: dict[Transfer, Owner] = {}
        self.content: dict[tuple[int, int], Label] = {}
        self.cells: dict[tuple[int, int, int], Label] = {}
        """By group, page and stage, where that has another content than the page."""
        self.passes: dict[Transfer, Pass] = {}
        self.written: dict[Transfer, int] = {}
        """What was said of transfers that come here."""
        self.cells_early = 0
        self.granted: set[Transfer] = set()
        self.copying: dict[Transfer, Copying] = {}
        self.arrived: dict[Transfer, int] = {}
        self.ended: dict[Transfer, str] = {}
        self.asked: dict[int, list[int]] = {}
        self.fetched: dict[int, Fetched] = {}
        self.numbers = itertools.count(1 << 20)  # none of those that copies have

    def owner(self, kind: str) -> Owner:
        return Owner(kind, self.name, self.incarnation, next(self.numbers))  # type: ignore[arg-type]

    def check(self, owner: Owner, tokens: Sequence[int]) -> None:
        """What the owner holds of a text has the right content."""
        groups = self.core.layout.groups
        for group, position, page in self.holds.pages(owner).tolist():
            right = label(groups[group], position, tokens)
            for stage in range(STAGES):
                found = self.cell(group, page, stage)
                if groups[group].kind is not GroupKind.STATE:
                    found = found[: len(right)]  # a page of a longer text that begins alike
                assert found == right, (self.name, group, position, stage)

    def cell(self, group: int, page: int, stage: int) -> Label:
        return self.cells.get((group, page, stage), self.content.get((group, page), ()))

    def write(self, group: int, page: int, content: Label) -> None:
        self.content[group, page] = content
        for stage in range(STAGES):
            self.cells.pop((group, page, stage), None)

    def copy(self, source: "Instance", group: int, page: int, own: int, stage: int) -> None:
        if stage != WHOLE:
            self.cells[group, own, stage] = source.cell(group, page, stage)
            return
        self.write(group, own, source.content.get((group, page), ()))
        for one in range(STAGES):
            self.cells[group, own, one] = source.cell(group, page, one)

    def compute(self, tokens: Sequence[int]) -> bool:
        """Compute a text as far as it is not cached, and cache it; whether there was room."""
        owner = self.owner("alloc")
        hold = self.holds.hold_text(owner, 1 << 60, ints([*tokens, 1 << 20]))
        known = tokens[: hold.hit_tokens]
        self.check(owner, known)
        missing = self.holds.receive(owner, len(tokens))
        if missing is None:
            return False
        for group, position, page in missing.tolist():
            self.write(group, page, label(self.core.layout.groups[group], position, tokens))
        self.check(owner, tokens)
        self.holds.insert(owner, len(tokens))
        return True

    def audit(self) -> None:
        assert audit(self.core.layout, self.core.snapshot()) == []
        assert audit_holds(self.holds, self.core) == []


@dataclass
class Network:
    """Three instances; messages wait until they are delivered, lost or doubled."""

    groups: list[GroupSpec]
    large: int
    now: int = 0
    instances: dict[str, Instance] = field(default_factory=dict)
    messages: list[tuple[str, int, str, PeerMessage]] = field(default_factory=list)
    texts: dict[Transfer, list[int]] = field(default_factory=dict)
    incarnations: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def start(self, name: str) -> None:
        instance = Instance(name, next(self.incarnations), self.groups, self.large)
        self.instances[name] = instance
        instance.agent.handle(Ticked(self.now))

    def crash(self, name: str) -> None:
        """An instance dies and starts again; the others hear of it."""
        died = self.instances[name].incarnation
        self.start(name)
        for other in self.instances.values():
            if other.name != name:
                self.act(other, other.agent.handle(PeerLost(name, died)))

    def act(self, instance: Instance, actions: Sequence[Action]) -> None:
        """Do what a machine asks for, in order."""
        for action in actions:
            if isinstance(action, Send):
                sent = (instance.name, instance.incarnation, action.instance, action.message)
                self.messages.append(sent)
            elif isinstance(action, Pull):
                assert action.transfer not in instance.copying
                groups = instance.core.layout.groups
                instance.copying[action.transfer] = Copying.of(action, groups)
            elif isinstance(action, PullRest):
                assert action.transfer in instance.copying
                instance.copying[action.transfer].is_whole = True
            elif isinstance(action, StopPull):
                instance.copying[action.transfer].is_stopped = True
            elif isinstance(action, Grant):
                instance.granted.add(action.transfer)
            elif isinstance(action, Revoke):
                instance.granted.remove(action.transfer)
            elif isinstance(action, Arrived):
                assert action.transfer not in instance.arrived
                instance.arrived[action.transfer] = action.computed
                self.taken(instance, action)
            elif isinstance(action, Ended):
                assert action.transfer not in instance.ended
                instance.ended[action.transfer] = action.problem
                instance.passes.pop(action.transfer, None)
                if action.transfer in instance.owners:
                    instance.holds.release(instance.owners.pop(action.transfer))
            elif isinstance(action, Fetched):
                assert action.number not in instance.fetched
                instance.fetched[action.number] = action
                asked = instance.asked[action.number][: action.computed]
                assert instance.core.peek(ints([*asked, 1 << 20]), "") >= action.computed
        instance.audit()

    def taken(self, instance: Instance, action: Arrived) -> None:
        owner = owner_of(action.transfer)
        if owner in instance.holds:
            instance.check(owner, self.texts[action.transfer][: action.computed])
            instance.holds.insert(owner, action.computed)

    def send(
        self,
        source: str,
        target: str,
        tokens: list[int],
        inserts: bool,
        ticks: int,
        *,
        is_ready: bool = True,
    ) -> bool:
        """Send what is cached of a text; whether anything is.

        :param is_ready: else it is only announced, until :meth:`ready`.
        """
        instance = self.instances[source]
        owner = instance.owner("departure")
        hold = instance.holds.hold_text(owner, self.now + ticks, ints([*tokens, 1 << 20]))
        if not hold.hit_tokens:
            instance.holds.release(owner)
            return False
        deadline = self.now + ticks
        transfer, actions = instance.sending.begin(
            target, hold.tokens, hold.hit_tokens, self.now, deadline, inserts=inserts
        )
        self.texts[transfer], instance.owners[transfer] = [*tokens, 1 << 20], owner
        hold.deadline = 1 << 60
        if is_ready:
            actions += instance.sending.ready(transfer, instance.holds.places(owner))
        self.act(instance, actions)
        return True

    def ask(self, source: str, target: str, tokens: list[int], ticks: int) -> int:
        """Ask an instance for what it has of a text; returns the ask's number."""
        instance = self.instances[source]
        beyond = instance.core.peek(ints([*tokens, 1 << 20]), "")
        deadline = self.now + ticks
        asking = instance.agent.asking
        number, actions = asking.ask(target, ints(tokens), self.now, deadline, beyond=beyond)
        instance.asked[number] = tokens
        self.act(instance, actions)
        return number

    def deliver(self, index: int, *, keeps: bool = False, loses: bool = False) -> None:
        """Hand a message over; one of a dead incarnation never arrives."""
        source, incarnation, target, message = self.messages[index % len(self.messages)]
        if not keeps:
            del self.messages[index % len(self.messages)]
        if loses or self.instances[source].incarnation != incarnation:
            return
        to = self.instances[target]
        if isinstance(message, Written):
            to.written[message.transfer] = max(message.stage, to.written.get(message.transfer, -1))
        self.act(to, to.agent.handle(Heard(source, message)))

    def hasten(self, waiting: int) -> None:
        """Deliver what was said last, until no more messages are left than so many."""
        while len(self.messages) > waiting:
            self.deliver(len(self.messages) - 1)

    def announce(
        self, source: str, target: str, tokens: list[int], inserts: bool, ticks: int
    ) -> bool:
        """Announce a text that is yet to be computed here; whether there is room for it."""
        instance = self.instances[source]
        owner, deadline = instance.owner("departure"), self.now + ticks
        instance.holds.hold_text(owner, 1 << 60, ints([*tokens, 1 << 20]))
        rows = instance.holds.receive(owner, len(tokens))
        if rows is None or not tokens:
            instance.holds.release(owner)
            return False
        transfer, actions = instance.sending.begin(
            target, ints(tokens), len(tokens), self.now, deadline, inserts=inserts
        )
        self.texts[transfer], instance.owners[transfer] = [*tokens, 1 << 20], owner
        instance.passes[transfer] = Pass(target, owner, tokens, rows.tolist())
        self.act(instance, actions)
        return True

    def begin_pass(self, name: str, index: int) -> None:
        """A step is about to compute a text that was announced: it is offered, if it can be."""
        instance = self.instances[name]
        if not instance.passes:
            return
        transfer = sorted(instance.passes)[index % len(instance.passes)]
        one = instance.passes[transfer]
        actions = instance.sending.early(transfer, instance.holds.places(one.owner), STAGES)
        one.is_early |= bool(actions)
        self.act(instance, actions)

    def write(self, name: str, index: int) -> None:
        """A pass goes on by a stage and tells of it; behind its last one the text is ready."""
        instance = self.instances[name]
        if not instance.passes:
            return
        transfer = sorted(instance.passes)[index % len(instance.passes)]
        one = instance.passes[transfer]
        if one.num_written == STAGES:
            del instance.passes[transfer]
            places = instance.holds.places(one.owner)
            self.act(instance, instance.sending.ready(transfer, places))
            return
        for group, position, page in one.rows:
            spec, stage = instance.core.layout.groups[group], one.num_written
            if spec.kind in BY_LAYER:
                instance.cells[group, page, stage] = label(spec, position, one.tokens)
            elif stage + 1 == STAGES:
                instance.write(group, page, label(spec, position, one.tokens))
        if one.is_early:
            hint = Written(transfer, one.num_written)
            self.messages.append((name, instance.incarnation, one.target, hint))
        one.num_written += 1

    def ready(self, source: str) -> None:
        """What was announced first is computed now."""
        instance = self.instances[source]
        waiting = [one for one in instance.owners.items() if one[0] not in instance.passes]
        for transfer, owner in waiting[:1]:
            self.act(instance, instance.sending.ready(transfer, instance.holds.places(owner)))

    def copy(self, name: str, index: int, count: int) -> None:
        """Copy some of a pull, as far as it is written; at its end, tell how it went."""
        instance = self.instances[name]
        if not instance.copying:
            return
        transfer = sorted(instance.copying)[index % len(instance.copying)]
        copying = instance.copying[transfer]
        source = self.instances[transfer.sender]
        is_there = source.incarnation == transfer.incarnation
        written = WHOLE if copying.is_whole else instance.written.get(transfer, -1)
        known = [one for one in copying.left if one[3] <= written]
        for one in known[: 0 if copying.is_stopped or not is_there else count]:
            copying.left.remove(one)
            instance.copy(source, *one)
            instance.cells_early += not copying.is_whole
        is_done = copying.is_whole and not copying.left
        if is_done or copying.is_stopped or not is_there:
            del instance.copying[transfer]
            whole = is_done and is_there and transfer in source.granted
            problem = "" if whole else "the right to read was revoked"
            self.act(instance, instance.agent.handle(PullEnded(transfer, problem)))

    def pass_time(self, ticks: int) -> None:
        self.now += ticks
        for instance in self.instances.values():
            self.act(instance, instance.agent.handle(Ticked(self.now)))

    def settle(self) -> None:
        """Everything that is under way ends, if only because it took too long."""
        for _ in range(400):
            if self.messages:
                self.deliver(0)
            for name in self.instances:
                self.copy(name, 0, 99)
                self.write(name, 0)
        assert not self.messages
        self.pass_time(1 << 30)
        for _ in range(200):
            if self.messages:
                self.deliver(0)
            for name in self.instances:
                self.copy(name, 0, 99)
