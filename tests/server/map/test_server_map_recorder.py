"""What is recorded of a front: its counters, heartbeats, and statistics that are fresh."""

from collections.abc import Sequence
from typing import cast

from kvell.clock import VirtualClock
from kvell.cluster.instance_load import InstanceLoad
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import InstanceReport, LoadStats, Stats
from kvell.fleet.fleet import InstanceState, MemberStatus
from kvell.front.front import Front
from kvell.front.request_queue import Entries
from kvell.server.map.history import HISTORY_SECONDS, MOST_INSTANCES, HistoryRow
from kvell.server.map.recorder import STALE_SECONDS, HistoryRecorder
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.vocabulary import RequestId
from tests.reports import facts

LOAD = LoadStats(9, 2, 3, 10, 4, 600, 1000, cached_bytes=250)
STATS = Stats(
    *(0, 9, 2, 3, 10, 4, 0.5, 0, 0, 0, 0, 0),
    rungs={"evict": 4},
    large_page_bytes=100,
    memory={"chunk_bytes": 50, "activation_used_chunks": 3},
)


class FakeFront:
    """Instances with the heartbeats that they are given."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.statuses: list[MemberStatus] = []
        self.loads: dict[str, InstanceLoad] = {}

    def add(self, name: str, state: InstanceState = "serving") -> InstanceLoad:
        self.statuses.append(
            MemberStatus(name, "mixed", state, 7, 0, InstanceReport(facts(), LOAD))
        )
        self.loads[name] = InstanceLoad(name)
        return self.loads[name]

    def instances(self) -> list[tuple[MemberStatus, InstanceLoad]]:
        return [(status, self.loads[status.instance_id]) for status in self.statuses]

    def entries(self) -> Entries:
        return Entries([], [])

    def now_seconds(self) -> float:
        return self.clock.now_seconds()


class Counters:
    """The metrics of a server that has sent some tokens."""

    def token_totals(self) -> tuple[int, int]:
        return 11, 7

    def take_latencies(self) -> tuple[Sequence[float], Sequence[float]]:
        return (0.5,), (0.25,)


def recorder_of(front: FakeFront) -> HistoryRecorder:
    return HistoryRecorder(cast(Front, front), cast(ServerMetrics, Counters()))


def latest(recorder: HistoryRecorder) -> HistoryRow:
    return recorder.history.rows_after(-1.0)[-1]


def test_a_sample_has_the_last_heartbeats_and_the_loans() -> None:
    front = FakeFront()
    front.add("mixed-0")
    borrowed = RequestPlacementEntry(RequestId("r"), "mixed-0", 4, local=False)
    front.add("mixed-1").placements = (borrowed,)
    recorder = recorder_of(front)
    recorder.sample()
    row = latest(recorder)
    assert (row.prompt_tokens, row.output_tokens, row.running, row.waiting) == (11, 7, 4, 6)
    creditor, debtor = row.instances["mixed-0"], row.instances["mixed-1"]
    assert (creditor.pool, creditor.kv_used, creditor.kv_cached) == (1000, 400, 250)
    assert (creditor.lent, creditor.borrowed, debtor.lent, debtor.borrowed) == (4, 0, 0, 4)
    assert creditor.activation is None and creditor.cpu_buffer is None
    assert recorder.history.medians() == (0.5, 0.25)


def test_an_ended_loan_stays_in_the_history_for_three_minutes() -> None:
    front = FakeFront()
    front.add("mixed-0")
    debtor = front.add("mixed-1")
    recorder = recorder_of(front)
    borrowed = RequestPlacementEntry(RequestId("r"), "mixed-0", 4, local=False)
    debtor.placements = (borrowed,)
    recorder.sample()
    debtor.placements = ()
    seconds = int(HISTORY_SECONDS)
    for _ in range(seconds):
        front.clock.advance(1.0)
        recorder.sample()
        lent = {
            pair: count for sample in recorder.history.loans() for pair, count in sample.items()
        }
        assert lent == {("mixed-0", "mixed-1"): 4}
    front.clock.advance(1.0)
    recorder.sample()
    assert not any(recorder.history.loans())


def test_statistics_are_recorded_while_they_are_fresh() -> None:
    front = FakeFront()
    front.add("mixed-0")
    recorder = recorder_of(front)
    front.clock.advance(10.0)
    recorder.note_stats({"mixed-0": STATS})
    recorder.sample()
    assert latest(recorder).instances["mixed-0"].activation == 150
    assert recorder.history.rungs_before("mixed-0") == {"evict": 4}
    front.clock.advance(STALE_SECONDS + 1)
    recorder.sample()
    assert latest(recorder).instances["mixed-0"].activation is None


def test_instances_that_do_not_serve_have_no_sample() -> None:
    front = FakeFront()
    front.add("mixed-0", "restarting")
    front.add("mixed-1", "draining")
    recorder = recorder_of(front)
    recorder.sample()
    assert list(latest(recorder).instances) == ["mixed-1"]


def test_a_sample_is_bounded_and_taken_once_a_second() -> None:
    front = FakeFront()
    for number in range(MOST_INSTANCES + 5):
        front.add(f"mixed-{number}")
    recorder = recorder_of(front)
    for _ in range(5):
        recorder.sample()
        front.clock.advance(0.2)
    assert len(recorder.history) == 1
    assert len(latest(recorder).instances) == MOST_INSTANCES
