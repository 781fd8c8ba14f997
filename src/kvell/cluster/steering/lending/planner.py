"""The gManager: plans loans from rounds of heartbeats, and remembers what it has planned.

::

    heartbeats of all ──► round ──► free memory less reservations ──► Algorithm 1 ──► moves
                                        ▲                                              │
                                        └───────────── reservations ◄──────────────────┘

A *debtor* has requests that wait for memory, or will outgrow what is free: it borrows before it is
short.  A *creditor* has more memory free than its own requests will need; its queue may wait for
seats.  An instance without either does neither, so nothing moves in an idle cluster.

Its information is old, so a creditor may refuse (``try_move_kvcache``).  A refused move is planned
again from a later round, once its reservation has expired.

Source: Infinite-LLM §5.3, §6.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvell.cluster.instance_load import SHORT_PART, InstanceLoad
from kvell.cluster.steering.lending.algorithm import Move, plan_moves, reactive_moves
from kvell.cluster.steering.lending.market import Creditor, Debtor
from kvell.cluster.steering.lending.model import PerformanceModel, ThroughputInputs
from kvell.cluster.steering.placements import NO_LOANS, Reading, lendable_sections, reading_of
from kvell.cluster.steering.relief import ROOM_PART
from kvell.engine.protocol.statistics import InstanceFacts, InstanceReport, LoadStats

Away = Counter[tuple[str, str]]
"""Sections of each request at each creditor."""


class PlacementMap:
    """The request placement map: the remote sections of all requests, by the latest heartbeats.

    :ivar away: sections of each request at each creditor.
    :ivar borrowed: sections of each debtor, by how it reads them.
    :ivar asking: number of requests of each debtor that ask creditors.
    """

    def __init__(self, reports: Mapping[str, InstanceReport]) -> None:
        self.away: Away = Counter()
        self.borrowed: defaultdict[str, Counter[Reading]] = defaultdict(Counter)
        self.reading: dict[str, Reading] = {}
        self.asking: Counter[str] = Counter()
        facts = {name: report.facts for name, report in reports.items()}
        for report in reports.values():
            if report.load is not None:
                self._add(report.load, facts)

    def _add(self, load: LoadStats, facts: Mapping[str, InstanceFacts]) -> None:
        homes = {entry.req_id: entry.inst_id for entry in load.placements if entry.local}
        for entry in load.placements:
            if entry.local:
                continue
            name = entry.req_id
            home = homes.get(name, "")
            reading = reading_of(facts.get(home), facts.get(entry.inst_id)) or "in place"
            self.away[name, entry.inst_id] += entry.num_blocks
            self.borrowed[home][reading] += entry.num_blocks
            self.asking[home] += reading == "asked" and name not in self.reading
            self.reading[name] = reading


def kept_bytes(memory: InstanceLoad, load: LoadStats) -> int:
    """Return the memory that a debtor needs beyond what it has: a part of its pool, or what its
    running requests will grow by."""
    return max(memory.pool_bytes // SHORT_PART, load.growth_bytes)


def needs_memory(memory: InstanceLoad, load: LoadStats) -> bool:
    return load.memory_waiting > 0 or memory.free_bytes < kept_bytes(memory, load)


def throughput_inputs(
    memory: InstanceLoad,
    facts: InstanceFacts,
    load: LoadStats,
    spare_bytes: int,
    lent_blocks: int = 0,
    borrowed: Mapping[Reading, int] = NO_LOANS,
    asking: int = 0,
) -> ThroughputInputs:
    """Return an instance's inputs of the performance model.

    Waiting requests count with answers of the length that the first one's is expected to have:
    memory for their prompts alone would admit them, and then preempt others.

    :param lent_blocks: sections of others that are stored there; ``borrowed``: its own elsewhere.
    """
    own_bytes = memory.pool_bytes - memory.free_bytes - lent_blocks * facts.section_bytes
    rest_tokens = (load.waiting_tokens - load.head_tokens) / max(1, load.waiting - 1)
    rest_tokens = max(0.0, rest_tokens)
    answer_bytes = load.answer_tokens * facts.token_bytes
    return ThroughputInputs(
        batch=load.running,
        held_tokens=load.held_tokens,
        running_bytes=max(0, own_bytes) / max(1, load.running),
        waiting=load.memory_waiting,
        head_tokens=load.head_tokens,
        head_bytes=load.head_bytes + answer_bytes,
        waiting_tokens=rest_tokens,
        waiting_bytes=rest_tokens * facts.token_bytes + answer_bytes,
        spare_bytes=spare_bytes,
        away_tokens=borrowed.get("in place", 0) * facts.section_tokens,
        lent_tokens=lent_blocks * facts.section_tokens,
        asked_tokens=borrowed.get("asked", 0) * facts.section_tokens,
        asking=asking,
    )


RESERVED_ROUNDS = 2
"""Rounds after which a reservation expires whose sections have not arrived."""
MOVING_PART = 4
"""Between two plans, an instance that has not measured what copies cost its steps copies pages for
at most one part in 4 of the time."""
MOST_COPY_COST = 0.02
"""Largest part of an instance's time that copies of sections may add to its steps."""
MOST_MODELS = 64
"""Instances of different prices whose performance models are kept from plan to plan."""


@dataclass
class Reservation:
    """A planned move of sections.

    :ivar blocks: sections of the request that the creditor has after the move.
    :ivar until: last round of the reservation.
    """

    move: Move
    blocks: int
    until: int


class LoanPlanner:
    """The planner of loans, from rounds of heartbeats; pure.

    :param settling_rounds: further rounds until heartbeats show a move.
    :param is_reactive: whether sections leave only an instance that has hardly any memory left,
        without regard to throughput (:func:`.reactive_moves`).
    """

    def __init__(
        self, period_seconds: float, settling_rounds: int = 0, *, is_reactive: bool = False
    ) -> None:
        self._is_reactive = is_reactive
        self._model = lru_cache(MOST_MODELS)(PerformanceModel)
        self._period_seconds = period_seconds
        self._rounds_reserved = RESERVED_ROUNDS + settling_rounds
        self._loads: Mapping[str, LoadStats] = {}
        self._round = 0
        self._reserved: list[Reservation] = []

    @property
    def parties(self) -> set[str]:
        return {name for loan in self._reserved for name in (loan.move.source, loan.move.target)}

    def plan(self, instances: Sequence[InstanceLoad], busy: Collection[str] = ()) -> list[Move]:
        """Return the moves to make now; none until all have sent heartbeats since the last plan."""
        loads = {
            party.instance_id: party.report.load
            for party in instances
            if party.report.load is not None
        }
        is_old = any(self._loads.get(name) is load for name, load in loads.items())
        if len(loads) < len(instances) or is_old:
            return []
        self._loads = loads
        placed = PlacementMap({party.instance_id: party.report for party in instances})
        self._round += 1
        away = placed.away
        self._reserved = [  # neither expired, nor arrived
            loan
            for loan in self._reserved
            if loan.until >= self._round
            and away[loan.move.request_id, loan.move.target] < loan.blocks
        ]
        held_up = {loan.move.source for loan in self._reserved}
        coming: Counter[str] = Counter()
        for loan in self._reserved:
            there = away[loan.move.request_id, loan.move.target]
            coming[loan.move.target] += min(loan.move.num_blocks, loan.blocks - there)
        lent: Counter[str] = Counter()
        for (_, lender), count in placed.away.items():
            lent[lender] += count
        lent.update(coming)
        debtors: list[Debtor] = []
        creditors: list[Creditor] = []
        for party in instances:
            name = party.instance_id
            load = loads[name]
            if name in busy or not party.report.facts.section_bytes:
                continue
            if needs_memory(party, load):
                may_borrow = party.role != "prefill" and not party.num_leaving and load.longest
                if may_borrow and name not in held_up and not lent[name]:
                    debtors.append(self._debtor(party, load, placed))
            elif party.can_take and name not in placed.borrowed and not party.num_coming:
                creditor = self._creditor(party, load, lent[name], coming[name])
                if creditor.spared > 0:
                    creditors.append(creditor)
        moves = (reactive_moves if self._is_reactive else plan_moves)(debtors, creditors)
        for move in moves:
            blocks = placed.away[move.request_id, move.target] + move.num_blocks
            until = self._round + self._rounds_reserved
            self._reserved.append(Reservation(move, blocks, until))
        return moves

    def _debtor(self, party: InstanceLoad, load: LoadStats, placed: PlacementMap) -> Debtor:
        facts, name = party.report.facts, party.instance_id
        kept = party.pool_bytes // SHORT_PART if self._is_reactive else kept_bytes(party, load)
        inputs = throughput_inputs(
            party,
            facts,
            load,
            party.free_bytes - kept,
            borrowed=placed.borrowed.get(name, NO_LOANS),
            asking=placed.asking[name],
        )
        return Debtor(
            name,
            facts,
            self._model(facts.prices),
            inputs,
            load.longest,
            self._copied_sections(facts, load),
            placed.reading,
        )

    def _creditor(self, party: InstanceLoad, load: LoadStats, lent: int, coming: int) -> Creditor:
        """Return a creditor with the memory that is left after existing and planned loans.

        It keeps what its own requests will need, with the head of its line, and at least a part of
        its pool; else it would soon recall what it lends.
        """
        facts, pool_bytes = party.report.facts, party.pool_bytes
        size_bytes = facts.section_bytes
        own_bytes = load.growth_bytes + load.head_bytes
        free_bytes = party.free_bytes - coming * size_bytes
        above_bytes = free_bytes - max(pool_bytes // ROOM_PART, own_bytes)
        room = (free_bytes - max(pool_bytes // SHORT_PART, own_bytes)) // size_bytes
        room = min(room, lendable_sections(pool_bytes, size_bytes) - lent)
        inputs = throughput_inputs(party, facts, load, above_bytes, lent - coming)
        return Creditor(
            party.instance_id,
            facts,
            self._model(facts.prices),
            inputs,
            room,
            above_bytes // size_bytes,
            self._copied_sections(facts, load),
        )

    def _copied_sections(self, facts: InstanceFacts, load: LoadStats) -> int:
        section_seconds = facts.prices.fetch_token_seconds * facts.section_tokens
        return sections_to_copy(self._period_seconds, section_seconds, load.copy_seconds)


def sections_to_copy(
    period_seconds: float, section_seconds: float, copy_seconds: float | None
) -> int:
    """Return the sections that an instance may copy in a period, at least one.

    Copies that the computation hides are bounded by the link alone; others by what they add to
    steps.

    :param section_seconds: of a section on the link.
    :param copy_seconds: what its copy adds to steps; None: not measured.
    """
    if copy_seconds is None:
        return max(1, int(period_seconds / MOVING_PART / section_seconds))
    on_link = int(period_seconds / section_seconds)
    cost_seconds = MOST_COPY_COST * period_seconds
    return max(
        1, on_link if copy_seconds * on_link <= cost_seconds else int(cost_seconds / copy_seconds)
    )
