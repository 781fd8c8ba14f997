"""Engine cores that hand requests to each other, with models whose pages can be read back."""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvell.cost.swap_rule import SwapRule
from kvell.elastic.arena import ActivationModel
from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, replay
from kvell.engine.core.lateness import Lateness
from kvell.engine.cpu_buffer.buffered_prefixes import BufferedPrefixes
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.moving.handovers import Handovers
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.protocol.messages import (
    Cancel,
    Event,
    Finished,
    Migrate,
    MoveKvCache,
    Submit,
    Tokens,
)
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import BorrowedPages, StepPlan, StepResult
from kvell.engine.setup.sharing import share_pool
from kvell.memory import Layout, create_core
from kvell.mempool.agent import Agent
from kvell.mempool.entries import (
    BY_QUERIES,
    Heard,
    PeerEntry,
    PeerLost,
    PeerMapped,
    PullEnded,
    Ticked,
)
from kvell.mempool.rendezvous import PdCaching
from kvell.mempool.transfers.actions import (
    Action,
    Grant,
    Pull,
    PullRest,
    Revoke,
    Send,
    StopPull,
)
from kvell.mempool.transfers.messages import PeerMessage, Transfer
from kvell.mempool.transfers.methods import StreamCosts
from kvell.vocabulary import RequestId
from tests.device.fake_chunks import FakeChunks
from tests.elastic.balloon_audit import audit_elastic
from tests.elastic.buffer_audit import audit_pages
from tests.engine.conftest import EOS
from tests.engine.lending.borrow_audit import audit_borrowed, audit_quiet
from tests.engine.swapping import Always, AtRandom
from tests.engine.virtual_model import Page, VirtualModel, expected_output
from tests.journaled import JournaledCore
from tests.mempool.agent_audit import audit_loans

SECTION_TOKENS = 8
"""Tokens that are lent at once; real sections have 512."""
REACH_TOKENS = 150
TOKENS_A_CHUNK = 8


@dataclass(frozen=True)
class Extras:
    """What an instance has besides its pool.

    :param buffer: large pages of its CPU buffer; 0: it has none.
    :param ahead: large pages that prompts may take to go ahead of decodes; 0: none may.
    :param chunk_parts: its pool is shared with activations, in chunks of so many quarters of a
        large page; 0: it is not.
    :param seed: decides which swaps are refused; negative: none is.
    """

    buffer: int = 0
    ahead: int = 0
    chunk_parts: int = 0
    seed: int = 0

    def rule(self) -> SwapRule:
        return AtRandom(self.seed) if self.seed >= 0 else Always()

    def chunk_bytes(self, layout: Layout) -> int:
        return layout.large_page_bytes * self.chunk_parts // 4

    def larges(self, layout: Layout) -> range:
        """Return the numbers of the large pages of the buffer, which need not follow the pool's
        last one."""
        first = layout.num_large_pages + (1 if self.buffer else 0)
        return range(first, first + self.buffer)


PLAIN = Extras()


def need_of(extras: Extras, layout: Layout) -> ActivationModel:
    return ActivationModel(0, extras.chunk_bytes(layout) // TOKENS_A_CHUNK, 0)


@dataclass
class Copying:
    """Rows still to be copied; of a pull in stages only once all is written."""

    rows: list[list[int]]
    is_whole: bool
    is_stopped: bool = False


class Instance:
    def __init__(
        self,
        name: str,
        incarnation: int,
        layout: Layout,
        limits: Limits,
        pd_caching: PdCaching = 2,
        streams: StreamCosts | None = None,
        extras: Extras = PLAIN,
    ) -> None:
        self.name, self.incarnation, self._streams = name, incarnation, streams
        self._extras = extras
        limits = replace(limits, section_tokens=SECTION_TOKENS, reach_tokens=REACH_TOKENS)
        self._layout, self._limits, self._pd_caching = layout, limits, pd_caching
        self.journal = Journal()
        self.engine = JournaledCore(self.fresh(), self.journal)
        self.model = VirtualModel(layout, buffer=extras.larges(layout))
        self.plans: list[StepPlan] = []
        self.planned_ahead = 0
        self.granted: set[Transfer] = set()
        self.lent: dict[int, tuple[str, list[tuple[int, int]]]] = {}
        self.answers = True
        self.copying: dict[Transfer, Copying] = {}
        self.running: deque[StepResult] = deque()
        self.inbox: deque[PeerEntry] = deque()

    def fresh(self) -> EngineCore:
        core, extras, limits = create_core(self._layout), self._extras, self._limits
        swapping = parking = memory = None
        if extras.chunk_parts:
            chunk_bytes = extras.chunk_bytes(self._layout)
            device = FakeChunks(-(-self._layout.pool_bytes // chunk_bytes), chunk_bytes)
            need = need_of(extras, self._layout)
            memory = share_pool(device, self._layout, core, need, None, None).steps
        if extras.buffer:
            buffer = PageBuffer(self._layout.groups, extras.buffer)
            swapping = Swapping(core, buffer, extras.rule())
            swapping.prefixes = BufferedPrefixes(core, buffer, extras.rule())
        if swapping is not None and extras.ahead:
            sizes = CpuBuffer(extras.buffer, extras.ahead)
            parking = Parking(core, swapping, sizes, limits.min_chunk_tokens)
        return EngineCore(
            core,
            limits,
            frozenset({EOS}),
            memory=memory,
            swapping=swapping,
            parking=parking,
            agent=Agent(core, self.name, self.incarnation, "virtual"),
            pd_caching=self._pd_caching,
            streams=self._streams,
            buffer_large=extras.larges(self._layout).start if extras.buffer else None,
        )

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    @property
    def handovers(self) -> Handovers:
        assert isinstance(self.core.pool, Handovers)
        return self.core.pool

    def audit(self) -> None:
        assert self.core.audit() == ()
        scheduler = self.core.scheduler
        if isinstance(scheduler.chunks.memory, SharedMemory):
            assert audit_elastic(scheduler.chunks.memory.memory) == []
        if scheduler.swapping is not None:
            assert audit_pages(scheduler.swapping.buffer) == []
        assert audit_quiet(self.handovers) == []
        assert audit_borrowed(self.handovers.borrowed) == []
        assert audit_loans(self.handovers.agent) == []

    def check_journal(self) -> None:
        assert replay(self.journal.entries, self.fresh()) == self.plans


class Beyond:
    """Behind an instance's pool and buffer lie the pools of all others, each where its
    incarnation says."""

    def __init__(self, layout: Layout, cluster: "Cluster", incarnation: int) -> None:
        self._layout, self._cluster, self._incarnation = layout, cluster, incarnation
        self._each_large = cluster.extras.larges(layout).stop

    def first_large(self, incarnation: int) -> int:
        return self._each_large * incarnation

    def page(self, group: int, page: int) -> Page:
        each = self._each_large * self._layout.groups[group].pages_per_large
        incarnation, own = divmod(page, each)
        found: Page = self._cluster.ever[incarnation].model.memory[group][own]
        return found

    def stands(self, pages: BorrowedPages) -> bool:
        at = self._cluster.instances.get(pages.instance)
        if at is None or at.incarnation != pages.incarnation:
            return False
        return any(one.number == pages.right for one in at.granted)

    def answer(self, pages: BorrowedPages) -> list[tuple[int, Page]] | None:
        at = self._cluster.instances.get(pages.instance)
        if at is None or not at.answers or not self.stands(pages):
            return None
        debtor, lent = at.lent[pages.right]
        assert self._cluster.instances[debtor].incarnation == self._incarnation
        return [(group, at.model.memory[group][page]) for group, page in lent]


@dataclass
class Entry:
    prompt: list[int]
    max_tokens: int
    salt: str
    emitted: list[int] = field(default_factory=list)
    attempt: int = 0
    at: str = ""
    goes_to: str = ""
    end: Finished | None = None
    is_dropped: bool = False
    placement: Sequence[tuple[str, int]] = ()

    def parts(self, name: str) -> tuple[RequestPlacementEntry, ...]:
        """The placement from the point of view of the instance that has it."""
        return tuple(
            RequestPlacementEntry(RequestId(name), at, count, local=not index)
            for index, (at, count) in enumerate(self.placement)
        )


@dataclass
class Cluster:
    """Instances, and a front that gives each request to one that hands it on to another.

    :param by_queries: whether creditors are asked for attention over what they lend.
    """

    layout: Layout
    limits: Limits
    names: Sequence[str]
    pd_caching: PdCaching = 2
    now: int = 0
    instances: dict[str, Instance] = field(default_factory=dict)
    ever: dict[int, Instance] = field(default_factory=dict)
    messages: list[tuple[str, int, str, PeerMessage]] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    incarnations: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    moved: int = 0
    streams: StreamCosts | None = None
    by_queries: bool = False
    extras: Extras = PLAIN

    def __post_init__(self) -> None:
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        incarnation = next(self.incarnations)
        instance = Instance(
            name, incarnation, self.layout, self.limits, self.pd_caching, self.streams, self.extras
        )
        self.instances[name] = self.ever[incarnation] = instance
        beyond = instance.model.beyond = Beyond(self.layout, self, incarnation)
        self.hear(instance, instance.engine.on_entry(Ticked(self.now)))
        for other in self.instances.values():
            for one, met in ((instance, other), (other, instance)):
                if one is not met:
                    first = beyond.first_large(met.incarnation)
                    first = BY_QUERIES if self.by_queries else first
                    entry = PeerMapped(met.name, met.incarnation, first)
                    self.take(one, entry)

    def submit(self, name: str, entry: Entry, at: str, goes_to: str, pulls_from: str = "") -> None:
        self.entries[name] = entry
        entry.at, entry.goes_to = at, goes_to
        sampling = SamplingParams(temperature=0, max_tokens=entry.max_tokens, ignore_eos=True)
        command = Submit(
            RequestSpec(
                RequestId(name),
                np.asarray(entry.prompt, "<i4").tobytes(),
                sampling,
                cache_salt=entry.salt,
            ),
            attempt=entry.attempt,
            output=np.asarray(entry.emitted, "<i4").tobytes(),
            goes_to=goes_to,
            pulls_from=pulls_from,
            placement=entry.parts(name),
        )
        instance = self.instances[at]
        self.hear(instance, instance.engine.tell(command))

    def migrate(self, name: str, goes_to: str) -> None:
        """Let a request go on elsewhere, if it has no way yet."""
        entry = self.entries[name]
        if entry.end or entry.goes_to or entry.at == goes_to:
            return
        entry.goes_to = goes_to
        instance = self.instances[entry.at]
        command = Migrate(RequestId(name), entry.attempt, goes_to)
        self.hear(instance, instance.engine.tell(command))

    def lend(self, name: str, num_blocks: int, dst: str) -> None:
        entry = self.entries[name]
        if entry.end or entry.at == dst:
            return
        instance = self.instances[entry.at]
        command = MoveKvCache(RequestId(name), entry.attempt, num_blocks, dst)
        self.hear(instance, instance.engine.tell(command))

    def be_late(self, name: str, lateness: Lateness) -> None:
        self.instances[name].engine.note(lateness)

    def cancel(self, name: str) -> None:
        entry = self.entries[name]
        entry.is_dropped = True
        for at in {entry.at, entry.goes_to} - {""}:
            instance = self.instances[at]
            self.hear(instance, instance.engine.tell(Cancel(RequestId(name))))

    def hear(self, instance: Instance, events: Sequence[Event]) -> None:
        """What an instance says, to the front; and what its agent wants done."""
        self.act(instance, instance.core.pool.take_actions())
        for event in events:
            if isinstance(event, Tokens):
                entry = self.entries[event.request_id]
                if event.attempt == entry.attempt and not entry.end:
                    fresh = event.token_ids[max(0, len(entry.emitted) - event.first_index) :]
                    assert event.first_index <= len(entry.emitted), "tokens are missing"
                    entry.emitted.extend(fresh)
            elif isinstance(event, Finished):
                self.finished(instance, event)
        instance.audit()

    def finished(self, instance: Instance, event: Finished) -> None:
        entry = self.entries[event.request_id]
        if event.attempt != entry.attempt or entry.end is not None:
            return
        if event.reason == "moved":
            assert instance.name == entry.at
            entry.at, entry.goes_to = entry.goes_to, ""
            self.moved += 1
        elif event.reason != "cancelled" or entry.is_dropped:
            entry.end = event

    def works(self, name: str) -> bool:
        return self.instances[name].core.has_work

    def step(self, name: str, ticks: int = 0) -> None:
        instance = self.instances[name]
        if not instance.core.has_work:
            return
        while instance.core.may_plan and not (instance.running and instance.inbox):
            instance.planned_ahead += len(instance.running)
            plan = instance.engine.plan()
            instance.plans.append(plan)
            self.act(instance, instance.core.pool.take_actions())  # offers of what is computed now
            instance.running.append(instance.model.run(plan))
        self.now += ticks
        if ticks:
            self.hear(instance, instance.engine.on_entry(Ticked(self.now)))
        self.hear(instance, instance.engine.commit(instance.running.popleft()))
        self.take_inbox(instance)

    def take(self, instance: Instance, entry: PeerEntry) -> None:
        """Let an instance process an entry, once no step of it runs."""
        instance.inbox.append(entry)
        self.take_inbox(instance)

    def take_inbox(self, instance: Instance) -> None:
        while instance.inbox and not instance.running:
            self.hear(instance, instance.engine.on_entry(instance.inbox.popleft()))

    def act(self, instance: Instance, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert action.instance != instance.name, "nobody tells itself anything"
                sent = (instance.name, instance.incarnation, action.instance, action.message)
                self.messages.append(sent)
            elif isinstance(action, Pull):
                rows = action.rows.tolist()
                instance.copying[action.transfer] = Copying(rows, not action.stages)
            elif isinstance(action, PullRest):
                if action.transfer in instance.copying:  # its end may wait for a step's result
                    instance.copying[action.transfer].is_whole = True
            elif isinstance(action, StopPull):
                if action.transfer in instance.copying:
                    instance.copying[action.transfer].is_stopped = True
            elif isinstance(action, Grant):
                instance.granted.add(action.transfer)
                if action.lends:
                    pages = np.frombuffer(action.pages, "<i4").reshape(-1, 2).tolist()
                    lent = [(group, page) for group, page in pages]
                    instance.lent[action.transfer.number] = action.receiver, lent
            else:
                assert isinstance(action, Revoke)
                instance.granted.remove(action.transfer)
                instance.lent.pop(action.transfer.number, None)

    def deliver(self, index: int, *, loses: bool = False) -> None:
        source, incarnation, target, message = self.messages.pop(index % len(self.messages))
        is_alive = self.instances[source].incarnation == incarnation
        if loses or not is_alive or target not in self.instances:
            return
        to = self.instances[target]
        self.take(to, Heard(source, message))

    def copy(self, name: str, index: int, count: int) -> None:
        instance = self.instances[name]
        if not instance.copying:
            return
        transfer = sorted(instance.copying)[index % len(instance.copying)]
        copying, source = instance.copying[transfer], self.instances[transfer.sender]
        is_there = source.incarnation == transfer.incarnation
        for _ in range(count if copying.is_whole and not copying.is_stopped else 0):
            if copying.rows and is_there:
                group, page, own = copying.rows.pop(0)
                instance.model.own_page(group, own)[:] = source.model.own_page(group, page)
        is_done = copying.is_whole and not copying.rows
        if is_done or copying.is_stopped or not is_there:
            del instance.copying[transfer]
            whole = is_done and is_there and transfer in source.granted
            ended = PullEnded(transfer, "" if whole else "the right to read was revoked")
            self.take(instance, ended)

    def pass_time(self, ticks: int) -> None:
        self.now += ticks
        for instance in self.instances.values():
            self.hear(instance, instance.engine.on_entry(Ticked(self.now)))

    def crash(self, name: str) -> None:
        """An instance dies; the front gives what it had to others, which go on."""
        died = self.instances[name].incarnation
        self.start(name)
        for other in list(self.instances.values()):
            if other.name != name:
                self.take(other, PeerLost(name, died))
        for request, entry in self.entries.items():
            if entry.end is None and entry.at == name:
                others = [one for one in self.names if one != name]
                if entry.goes_to and entry.goes_to != name:
                    other = self.instances[entry.goes_to]
                    self.hear(other, other.engine.tell(Cancel(RequestId(request))))
                entry.attempt += 1
                goes_to = others[-1] if len(others) > 1 and not entry.placement else ""
                entry.placement = self.placed_anew(entry, others)
                self.submit(request, entry, others[0], goes_to)

    def placed_anew(self, entry: Entry, others: Sequence[str]) -> list[tuple[str, int]]:
        """Where a request is to lie whose instance has died: the others have it in equal parts."""
        if not entry.placement:
            return []
        local = entry.placement[0][1]
        away = sum(count for _, count in entry.placement[1:])
        names = [one for one in self.names if one != others[0]]
        each = -(-away // len(names))
        return [(others[0], local), *((one, each) for one in names)]

    def settle(self) -> None:
        """Everything goes on until all requests have ended."""
        for turn in range(3000):
            while self.messages:
                self.deliver(0)
            for name in self.names:
                self.copy(name, 0, 99)
                self.step(name)
            if all(entry.end for entry in self.entries.values()) and not self.messages:
                break
            waits = not self.messages and not any(self.works(name) for name in self.names)
            if waits or turn % 300 == 299:
                self.pass_time(1_000_000)
        for _ in range(50):
            while self.messages:
                self.deliver(0)
            for name in self.names:
                self.copy(name, 0, 99)
                self.step(name)
            self.pass_time(1_000_000)

    def check_ends(self) -> None:
        for name, entry in self.entries.items():
            assert entry.end is not None, f"{name} was lost at {entry.at}"
            right = expected_output(entry.prompt, len(entry.emitted))
            assert entry.emitted == right, name
            if entry.end.reason == "length":
                blocks = sum(count for _, count in entry.placement)
                most = min(REACH_TOKENS, blocks * SECTION_TOKENS)
                room = max(self.limits.max_model_len, most) - len(entry.prompt)
                assert len(entry.emitted) == min(entry.max_tokens, room)
            else:
                assert entry.is_dropped or entry.end.reason == "refused"
        for instance in self.instances.values():
            assert not instance.granted and not instance.copying
            assert not any(instance.core.memory.snapshot().used)
            sent = instance.handovers.agent.copies.sent
            assert sent is None or not len(sent), "pages of the buffer are kept for nobody"
            buffered = instance.handovers.agent.receiving.buffered
            assert buffered is None or not len(buffered), "pages of the buffer wait for a text"
            if (swapping := instance.core.scheduler.swapping) is not None:
                swapping.drop_prefixes()
                swapping.begin()
                assert swapping.buffer.used_large == 0
            assert not instance.core.has_work
            loans = instance.handovers.agent
            assert not len(loans.borrowing) and not len(loans.lending)
            instance.check_journal()
