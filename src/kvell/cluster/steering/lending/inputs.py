"""The inputs of a plan of loans, from heartbeats: where sections are, and what each load needs."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from kvell.cluster.steering.lending.model import ThroughputInputs
from kvell.cluster.steering.placements import NO_LOANS, Reading, reading_of
from kvell.cluster.steering.relief import SHORT_PART, MemoryPressure
from kvell.engine.protocol.statistics import InstanceFacts, InstanceReport, LoadStats
from kvell.vocabulary import RequestId

Away = Counter[tuple[RequestId, str]]
"""Sections of each request at each creditor."""


class PlacementMap:
    """The request placement map: the remote sections of all requests, by the latest heartbeats.

    :ivar away: sections of each request at each creditor.
    :ivar borrowed: sections of each debtor, by how it reads them.
    :ivar reading: how each such request's steps read them.
    :ivar asking: number of requests of each debtor that ask creditors.
    """

    def __init__(self, reports: Mapping[str, InstanceReport]) -> None:
        self.away: Away = Counter()
        self.borrowed: defaultdict[str, Counter[Reading]] = defaultdict(Counter)
        self.reading: dict[RequestId, Reading] = {}
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


def kept_bytes(memory: MemoryPressure, load: LoadStats) -> int:
    """Return the memory that a debtor needs beyond what it has: a part of its pool, or what its
    running requests will grow by."""
    return max(memory.pool_bytes // SHORT_PART, load.growth_bytes)


def needs_memory(memory: MemoryPressure, load: LoadStats) -> bool:
    return load.memory_waiting > 0 or memory.free_bytes < kept_bytes(memory, load)


def throughput_inputs(
    memory: MemoryPressure,
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
