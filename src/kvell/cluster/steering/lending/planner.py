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
from functools import lru_cache
from typing import Protocol

from kvell.cluster.steering.lending.algorithm import Creditor, Debtor, SectionMove, plan_moves
from kvell.cluster.steering.lending.model import PerformanceModel, ThroughputInputs
from kvell.cluster.steering.placements import lendable_blocks
from kvell.cluster.steering.relief import ROOM_PART, SHORT_PART, MemoryPressure, is_short
from kvell.engine.protocol.statistics import InstanceFacts, InstanceReport, LoadStats
from kvell.vocabulary import RequestId

RESERVED_ROUNDS = 2
"""Rounds after which a reservation expires whose sections have not arrived."""
MOVING_PART = 4
"""Between two plans, either side copies pages for at most one part in 4 of the time."""
MOST_MODELS = 64
"""Instances of different prices whose performance models are kept from plan to plan."""

Away = Counter[tuple[RequestId, str]]
"""Sections of each request at each creditor."""


class LoanParty(MemoryPressure, Protocol):
    """An instance that serves, and may lend or borrow."""

    @property
    def report(self) -> InstanceReport:
        """The latest report of the instance; its ``load`` is None before the first heartbeat."""
        ...

    @property
    def role(self) -> str:
        """The current role of the instance."""
        ...

    @property
    def can_take(self) -> bool:
        """Whether the instance may continue requests of others, or hold memory for them."""
        ...


def should_give(instance: LoanParty) -> bool:
    """Return whether requests should leave an instance; they leave prefill ones by themselves."""
    return instance.role != "prefill" and is_short(instance) and not instance.num_leaving


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

    :param period_seconds: time between two plans.
    :param settling_rounds: further rounds until heartbeats show a move.
    """

    def __init__(self, period_seconds: float, settling_rounds: int = 0) -> None:
        self._model = lru_cache(MOST_MODELS)(PerformanceModel)
        self._moving_seconds = period_seconds / MOVING_PART
        self._rounds_reserved = RESERVED_ROUNDS + settling_rounds
        self._loads: Mapping[str, LoadStats] = {}
        self._round = 0
        self._reserved: list[Reservation] = []

    @property
    def parties(self) -> set[str]:
        """Instances of moves that heartbeats do not show yet."""
        return {name for loan in self._reserved for name in (loan.move.source, loan.move.target)}

    def plan(self, instances: Sequence[LoanParty], busy: Collection[str] = ()) -> list[SectionMove]:
        """Return the moves to make now; none until all have sent heartbeats since the last plan.

        :param instances: all that serve.
        :param busy: instances in moves of other kinds.
        """
        loads = {
            party.instance_id: party.report.load
            for party in instances
            if party.report.load is not None
        }
        if len(loads) < len(instances) or not self._is_new(loads):
            return []
        away, borrows = _placed(loads.values())
        self._round += 1
        self._settle(away)
        if not any(map(should_give, instances)):
            return []
        coming, held_up = self._coming(away)
        lent: Counter[str] = Counter()
        for (_, lender), count in away.items():
            lent[lender] += count
        lent.update(coming)
        debtors: list[Debtor] = []
        creditors: list[Creditor] = []
        for party in instances:
            name = party.instance_id
            load = loads[party.instance_id]
            if name in busy or not party.report.facts.section_bytes:
                continue
            gives = should_give(party)
            if gives and name not in held_up and not lent[name] and load.longest:
                debtors.append(self._debtor(party, load, borrows[name]))
            elif party.can_take and name not in borrows and not _wants(party):
                creditor = self._creditor(party, load, lent[name], coming[name])
                if creditor.spared > 0:
                    creditors.append(creditor)
        moves = plan_moves(debtors, creditors)
        for move in moves:
            blocks = away[move.req_id, move.target] + move.num_blocks
            until = self._round + self._rounds_reserved
            self._reserved.append(Reservation(move, blocks, until))
        return moves

    def _is_new(self, loads: Mapping[str, LoadStats]) -> bool:
        """Return whether all have sent heartbeats since the last round, which begins a new one."""
        if any(self._loads.get(name) is load for name, load in loads.items()):
            return False
        self._loads = dict(loads)
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

    def _debtor(self, party: LoanParty, load: LoadStats, away_blocks: int) -> Debtor:
        spare_bytes = party.free_bytes - party.pool_bytes // SHORT_PART
        inputs = _inputs(party, load, spare_bytes, away_blocks=away_blocks)
        facts = party.report.facts
        return Debtor(
            *(party.instance_id, facts, self._model(facts.prices), inputs),
            *(load.longest, self._blocks(facts)),
        )

    def _creditor(self, party: LoanParty, load: LoadStats, lent: int, coming: int) -> Creditor:
        """Return a creditor with the memory that is left after existing and planned loans."""
        facts, pool_bytes = party.report.facts, party.pool_bytes
        size_bytes = facts.section_bytes
        free_bytes = party.free_bytes - coming * size_bytes
        above_bytes = free_bytes - pool_bytes // ROOM_PART
        room = (free_bytes - pool_bytes // SHORT_PART) // size_bytes
        room = min(room, lendable_blocks(pool_bytes, size_bytes) - lent)
        return Creditor(
            *(party.instance_id, facts, self._model(facts.prices)),
            _inputs(party, load, above_bytes, lent - coming),
            *(room, above_bytes // size_bytes, self._blocks(facts)),
        )

    def _blocks(self, facts: InstanceFacts) -> int:
        """Return the sections that an instance can copy within a period, at least one."""
        tokens = self._moving_seconds / facts.prices.fetch_token_seconds
        return max(1, int(tokens / facts.section_tokens))


def _placed(loads: Collection[LoadStats]) -> tuple[Away, Counter[str]]:
    """Return the request placement map: sections by creditor, and the total of each debtor."""
    away: Away = Counter()
    borrows: Counter[str] = Counter()
    for load in loads:
        homes = {entry.req_id: entry.inst_id for entry in load.placements if entry.local}
        for entry in load.placements:
            if not entry.local:
                away[entry.req_id, entry.inst_id] += entry.num_blocks
                borrows[homes.get(entry.req_id, "")] += entry.num_blocks
    return away, borrows


def _wants(memory: MemoryPressure) -> bool:
    """Return whether an instance needs its memory for requests that it has or expects."""
    return bool(memory.waiting or memory.num_coming)


def _inputs(
    party: LoanParty,
    load: LoadStats,
    spare_bytes: int,
    lent_blocks: int = 0,
    away_blocks: int = 0,
) -> ThroughputInputs:
    facts, waiting = party.report.facts, party.waiting
    own_bytes = party.pool_bytes - party.free_bytes - lent_blocks * facts.section_bytes
    waiting_tokens = load.waiting_tokens / max(1, waiting)
    return ThroughputInputs(
        load.running,
        load.held_tokens,
        max(0, own_bytes) / max(1, load.running),
        waiting,
        waiting_tokens,
        waiting_tokens * facts.token_bytes,
        spare_bytes,
        away_blocks * facts.section_tokens,
        lent_blocks * facts.section_tokens,
    )
