"""The gManager: plans loans from rounds of heartbeats, and remembers what it has planned.

::

    heartbeats of all ──► round ──► free memory less reservations ──► Algorithm 1 ──► moves
                                        ▲                                              │
                                        └───────────── reservations ◄──────────────────┘

What it knows is old.  So a creditor may refuse (``try_move_kvcache``), and nothing is repeated:
what was refused is planned anew from a later round, once its reservation has expired.

Source: Infinite-LLM §5.3, §6.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.cluster.routing.costs import ExecCosts
from kvell.cluster.steering.lending.algorithm import Creditor, Debtor, SectionMove, planned
from kvell.cluster.steering.lending.model import Load, PerformanceModel
from kvell.cluster.steering.lending.views import LendingView
from kvell.cluster.steering.placements import lendable_blocks
from kvell.cluster.steering.relief import ROOM_PART, SHORT_PART, MemoryView
from kvell.vocabulary import RequestId

RESERVED_ROUNDS = 2
"""What a plan reserves is free again after so many further rounds, unless it has come by then."""
MOVING_PART = 4
"""Between two plans pages are copied for at most one part in 4 of the time, by either side."""

Away = Counter[tuple[RequestId, str]]
"""Sections of each request at each creditor."""


class Party(Protocol):
    """An instance that serves, as :class:`.Steered` has it."""

    @property
    def memory(self) -> MemoryView:
        """Its memory."""
        ...

    @property
    def lending(self) -> LendingView | None:
        """What its last heartbeat says of loans; None before the first."""
        ...

    @property
    def takes(self) -> bool:
        """Whether it may have memory for others."""
        ...

    @property
    def gives(self) -> bool:
        """Whether it is short of memory."""
        ...


@dataclass
class Reservation:
    """Sections that are planned to go somewhere.

    :ivar blocks: that the creditor is to have of the request in the end.
    :ivar until: round behind which it has expired.
    """

    move: SectionMove
    blocks: int
    until: int


class LoanPlanner:
    """Rounds of heartbeats in, moves of sections out; pure.

    :param costs: of the instances' model.
    :param period_seconds: between two plans.
    :param settling_rounds: after so many further rounds a move shows in heartbeats.
    """

    def __init__(self, costs: ExecCosts, period_seconds: float, settling_rounds: int = 0) -> None:
        self._model = PerformanceModel(costs)
        self._period_tokens = period_seconds / MOVING_PART / costs.fetch_token_seconds
        self._rounds_reserved = RESERVED_ROUNDS + settling_rounds
        self._beats: dict[str, int] = {}
        self._round = 0
        self._reserved: list[Reservation] = []

    @property
    def parties(self) -> set[str]:
        """Instances of moves that do not show in heartbeats yet."""
        return {name for one in self._reserved for name in (one.move.source, one.move.target)}

    def plan(self, instances: Sequence[Party], busy: Collection[str] = ()) -> list[SectionMove]:
        """Return what should be moved now; nothing before all have beaten since the last plan.

        :param instances: all that serve.
        :param busy: those that are in moves of other kinds.
        """
        views = {
            one.memory.instance_id: one.lending for one in instances if one.lending is not None
        }
        if len(views) < len(instances) or not self._is_new(views):
            return []
        away, borrows = _placed(views.values())
        self._round += 1
        self._settle(away)
        if not any(one.gives for one in instances):
            return []
        coming, held_up = self._coming(away)
        lent: Counter[str] = Counter()
        for (_, lender), count in away.items():
            lent[lender] += count
        lent.update(coming)
        debtors: list[Debtor] = []
        creditors: list[Creditor] = []
        for one in instances:
            name, view = one.memory.instance_id, one.lending
            if view is None or name in busy or not view.reach.block_bytes:
                continue
            is_free = name not in held_up and not lent[name]
            if one.gives and is_free and view.longest:
                debtors.append(self._debtor(one.memory, view, borrows[name]))
            elif one.takes and name not in borrows and not _wants(one.memory):
                creditor = self._creditor(one.memory, view, lent[name], coming[name])
                if creditor.spared > 0:
                    creditors.append(creditor)
        moves = planned(debtors, creditors, self._model)
        for move in moves:
            blocks = away[move.req_id, move.target] + move.num_blocks
            until = self._round + self._rounds_reserved
            self._reserved.append(Reservation(move, blocks, until))
        return moves

    def _is_new(self, views: Mapping[str, LendingView]) -> bool:
        """Whether all instances have beaten since the last round; then that is one."""
        if any(self._beats.get(name) == one.beat for name, one in views.items()):
            return False
        self._beats = {name: one.beat for name, one in views.items()}
        return True

    def _settle(self, away: Away) -> None:
        """Forget what has come, and what was reserved for long enough."""
        self._reserved = [
            one
            for one in self._reserved
            if one.until >= self._round and away[one.move.req_id, one.move.target] < one.blocks
        ]

    def _coming(self, away: Away) -> tuple[Counter[str], set[str]]:
        """Sections that are still to come to creditors, and instances that are to borrow them."""
        coming: Counter[str] = Counter()
        for one in self._reserved:
            there = away[one.move.req_id, one.move.target]
            coming[one.move.target] += min(one.move.num_blocks, one.blocks - there)
        return coming, {one.move.source for one in self._reserved}

    def _debtor(self, memory: MemoryView, view: LendingView, away_blocks: int) -> Debtor:
        needed_bytes = memory.pool_bytes // SHORT_PART
        load = _load(memory, view, memory.free_bytes - needed_bytes, away_blocks=away_blocks)
        return Debtor(memory.instance_id, view.reach, load, view.longest, self._blocks(view))

    def _creditor(self, memory: MemoryView, view: LendingView, lent: int, coming: int) -> Creditor:
        """What an instance has for others, behind what it lends and what is to come to it."""
        size_bytes = view.reach.block_bytes
        free_bytes = memory.free_bytes - coming * size_bytes
        above_bytes = free_bytes - memory.pool_bytes // ROOM_PART
        room = (free_bytes - memory.pool_bytes // SHORT_PART) // size_bytes
        room = min(room, lendable_blocks(memory.pool_bytes, size_bytes) - lent)
        return Creditor(
            *(memory.instance_id, view.reach, _load(memory, view, above_bytes, lent - coming)),
            *(room, above_bytes // size_bytes, self._blocks(view)),
        )

    def _blocks(self, view: LendingView) -> int:
        """Sections that an instance sends or takes in within a period, one at least."""
        return max(1, int(self._period_tokens / view.reach.section_tokens))


def _placed(views: Collection[LendingView]) -> tuple[Away, Counter[str]]:
    """The request placement map: sections at creditors; and those of each debtor elsewhere."""
    away: Away = Counter()
    borrows: Counter[str] = Counter()
    for view in views:
        homes = {one.req_id: one.inst_id for one in view.placements if one.local}
        for one in view.placements:
            if not one.local:
                away[one.req_id, one.inst_id] += one.num_blocks
                borrows[homes.get(one.req_id, "")] += one.num_blocks
    return away, borrows


def _wants(memory: MemoryView) -> bool:
    """Whether an instance needs its memory for requests that it has or will have."""
    return bool(memory.waiting or memory.coming)


def _load(
    memory: MemoryView,
    view: LendingView,
    spare_bytes: int,
    lent_blocks: int = 0,
    away_blocks: int = 0,
) -> Load:
    """What decides the instance's throughput, from what it said."""
    own_bytes = memory.pool_bytes - memory.free_bytes - lent_blocks * view.reach.block_bytes
    waiting_tokens = view.waiting_tokens / max(1, memory.waiting)
    return Load(
        view.batch,
        view.held_tokens,
        max(0, own_bytes) / max(1, view.batch),
        memory.waiting,
        waiting_tokens,
        waiting_tokens * view.token_bytes,
        spare_bytes,
        away_blocks * view.reach.section_tokens,
        lent_blocks * view.reach.section_tokens,
    )
