"""The gManager: plans loans from rounds of heartbeats, and remembers what it has planned.

::

    heartbeats of all ──► round ──► free memory less reservations ──► Algorithm 1 ──► moves
                                        ▲                                              │
                                        └───────────── reservations ◄──────────────────┘

Its information is old, so a creditor may refuse (``try_move_kvcache``).  A refused move is planned
again from a later round, once its reservation has expired.

Source: Infinite-LLM §5.3, §6.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.cluster.routing.costs import ExecCosts
from kvell.cluster.steering.lending.algorithm import Creditor, Debtor, SectionMove, plan_moves
from kvell.cluster.steering.lending.model import PerformanceModel, ThroughputInputs
from kvell.cluster.steering.lending.views import LendingView
from kvell.cluster.steering.placements import lendable_blocks
from kvell.cluster.steering.relief import ROOM_PART, SHORT_PART, MemoryView
from kvell.vocabulary import RequestId

RESERVED_ROUNDS = 2
"""Rounds after which a reservation expires whose sections have not arrived."""
MOVING_PART = 4
"""Between two plans, either side copies pages for at most one part in 4 of the time."""

Away = Counter[tuple[RequestId, str]]
"""Sections of each request at each creditor."""


class Party(Protocol):
    """An instance that serves; the protocol of :class:`.Steered`."""

    @property
    def memory(self) -> MemoryView:
        """The instance's memory."""
        ...

    @property
    def lending(self) -> LendingView | None:
        """The loans by its last heartbeat; None before the first."""
        ...

    @property
    def takes(self) -> bool:
        """Whether the instance may hold memory for others."""
        ...

    @property
    def gives(self) -> bool:
        """Whether the instance is short of memory."""
        ...


@dataclass
class Reservation:
    """A planned move of sections.

    :ivar blocks: sections of the request that the creditor has after the move.
    :ivar until: last round of the reservation.
    """

    move: SectionMove
    blocks: int
    until: int


class LoanPlanner:
    """The planner of loans, from rounds of heartbeats; pure.

    :param costs: of the instances' model.
    :param period_seconds: time between two plans.
    :param settling_rounds: further rounds until heartbeats show a move.
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
        """Instances of moves that heartbeats do not show yet."""
        return {name for loan in self._reserved for name in (loan.move.source, loan.move.target)}

    def plan(self, instances: Sequence[Party], busy: Collection[str] = ()) -> list[SectionMove]:
        """Return the moves to make now; none until all have sent heartbeats since the last plan.

        :param instances: all that serve.
        :param busy: instances in moves of other kinds.
        """
        views = {
            party.memory.instance_id: party.lending
            for party in instances
            if party.lending is not None
        }
        if len(views) < len(instances) or not self._is_new(views):
            return []
        away, borrows = _placed(views.values())
        self._round += 1
        self._settle(away)
        if not any(party.gives for party in instances):
            return []
        coming, held_up = self._coming(away)
        lent: Counter[str] = Counter()
        for (_, lender), count in away.items():
            lent[lender] += count
        lent.update(coming)
        debtors: list[Debtor] = []
        creditors: list[Creditor] = []
        for party in instances:
            name, view = party.memory.instance_id, party.lending
            if view is None or name in busy or not view.reach.block_bytes:
                continue
            is_free = name not in held_up and not lent[name]
            if party.gives and is_free and view.longest:
                debtors.append(self._debtor(party.memory, view, borrows[name]))
            elif party.takes and name not in borrows and not _wants(party.memory):
                creditor = self._creditor(party.memory, view, lent[name], coming[name])
                if creditor.spared > 0:
                    creditors.append(creditor)
        moves = plan_moves(debtors, creditors, self._model)
        for move in moves:
            blocks = away[move.req_id, move.target] + move.num_blocks
            until = self._round + self._rounds_reserved
            self._reserved.append(Reservation(move, blocks, until))
        return moves

    def _is_new(self, views: Mapping[str, LendingView]) -> bool:
        """Return whether all have sent heartbeats since the last round, which begins a new one."""
        if any(self._beats.get(name) == view.beat for name, view in views.items()):
            return False
        self._beats = {name: view.beat for name, view in views.items()}
        return True

    def _settle(self, away: Away) -> None:
        """Drop reservations that have expired, or whose sections have arrived."""
        self._reserved = [
            loan
            for loan in self._reserved
            if loan.until >= self._round and away[loan.move.req_id, loan.move.target] < loan.blocks
        ]

    def _coming(self, away: Away) -> tuple[Counter[str], set[str]]:
        """Return the sections that creditors still expect, and the instances that borrow them."""
        coming: Counter[str] = Counter()
        for loan in self._reserved:
            there = away[loan.move.req_id, loan.move.target]
            coming[loan.move.target] += min(loan.move.num_blocks, loan.blocks - there)
        return coming, {loan.move.source for loan in self._reserved}

    def _debtor(self, memory: MemoryView, view: LendingView, away_blocks: int) -> Debtor:
        needed_bytes = memory.pool_bytes // SHORT_PART
        load = _load(memory, view, memory.free_bytes - needed_bytes, away_blocks=away_blocks)
        return Debtor(memory.instance_id, view.reach, load, view.longest, self._blocks(view))

    def _creditor(self, memory: MemoryView, view: LendingView, lent: int, coming: int) -> Creditor:
        """Return a creditor with the memory that is left after existing and planned loans."""
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
        """Return the sections that an instance can copy within a period, at least one."""
        return max(1, int(self._period_tokens / view.reach.section_tokens))


def _placed(views: Collection[LendingView]) -> tuple[Away, Counter[str]]:
    """Return the request placement map: sections by creditor, and the total of each debtor."""
    away: Away = Counter()
    borrows: Counter[str] = Counter()
    for view in views:
        homes = {entry.req_id: entry.inst_id for entry in view.placements if entry.local}
        for entry in view.placements:
            if not entry.local:
                away[entry.req_id, entry.inst_id] += entry.num_blocks
                borrows[homes.get(entry.req_id, "")] += entry.num_blocks
    return away, borrows


def _wants(memory: MemoryView) -> bool:
    """Return whether an instance needs its memory for requests that it has or expects."""
    return bool(memory.waiting or memory.coming)


def _load(
    memory: MemoryView,
    view: LendingView,
    spare_bytes: int,
    lent_blocks: int = 0,
    away_blocks: int = 0,
) -> ThroughputInputs:
    own_bytes = memory.pool_bytes - memory.free_bytes - lent_blocks * view.reach.block_bytes
    waiting_tokens = view.waiting_tokens / max(1, memory.waiting)
    return ThroughputInputs(
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
