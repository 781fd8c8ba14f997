"""Clusters in virtual time whose front plans loans by itself (Infinite-LLM, Algorithm 1)."""

import pytest

from kvell.cluster.steering.relief import Relief
from kvell.engine.lending.distributed_request import section_bytes
from kvell.engine.requests.limits import Limits
from kvell.simulator.cluster.cluster import VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.cluster.instance import NeighbourReads
from kvell.vocabulary import SECTION_TOKENS
from tests.simulator.cluster.lending_schedules import order
from tests.simulator.cluster.planned import LAYOUT, ROWS, run_of, spec_of, waits
from tests.simulator.cluster.runs import POOL_TOKENS
from tests.simulator.replays import row


def test_a_short_request_waits_less_where_the_long_one_lies_elsewhere_in_part() -> None:
    lent, alone = run_of(), run_of(hosts=None)
    sections = cluster_figures(lent)["sections"]
    assert sections["lent"] > 0 and sections["lost"] == sections["returned"] == 0
    assert cluster_figures(alone)["sections"]["lent"] == 0
    assert waits(lent) < waits(alone) / 2
    assert lent.front.outputs == alone.front.outputs
    ends = [cluster_figures(one)["requests_finished"] for one in (lent, alone)]
    assert ends == [3, 3]


def test_an_instance_whose_line_waits_for_seats_lends_what_its_line_cannot_use() -> None:
    """Two of its requests run, and a third waits for a seat the whole time; both instances have a
    line, as at saturation."""
    tiny = [row(10, 2, at=at) for at in (0.2, 0.4)]
    busy = [row(400, 1200, at=at) for at in (0.1, 0.3, 0.5)]
    rows = [row(6000, 1500, at=0.0), busy[0], tiny[0], busy[1], tiny[1], busy[2]]
    rows.append(row(2000, 100, at=4.0))
    limits = Limits(2048, 2, max_model_len=POOL_TOKENS)
    lent, alone = run_of(rows, limits=limits), run_of(rows, limits=limits, hosts=None)
    assert cluster_figures(lent)["sections"]["lent"] > 0
    assert lent.instances["mixed-1"].counts.lent and waits(lent) < waits(alone) / 2
    assert lent.front.outputs == alone.front.outputs


def test_each_instance_is_on_one_side_and_no_sections_are_left() -> None:
    lent = run_of()
    while lent.go_on():  # what is given back is answered
        pass
    debtor, creditor = (lent.instances[name] for name in ("mixed-0", "mixed-1"))
    assert debtor.counts.borrowed and not debtor.counts.lent
    assert creditor.counts.lent and not creditor.counts.borrowed
    for one in (debtor, creditor):
        assert not len(one.agent.lending) and not len(one.agent.borrowing)


def test_instances_of_another_host_are_asked_for_nothing() -> None:
    apart = run_of(hosts={"mixed-1": "another"})
    assert not cluster_figures(apart)["sections"]["lent"]
    refused = apart.instances["mixed-1"].agent
    assert not len(refused.lending) and not len(refused.borrowing)


def test_reading_elsewhere_takes_the_time_that_it_is_said_to_take() -> None:
    """For whoever reads, and for whoever's memory is read."""
    free, dear = run_of(), run_of(reads=NeighbourReads(0.002, 0.001))
    busy = [
        [
            one.instances[name].counts.busy_seconds / one.instances[name].counts.steps
            for name in ("mixed-0", "mixed-1")
        ]
        for one in (free, dear)
    ]
    assert busy[1][0] > busy[0][0] and busy[1][1] > busy[0][1]
    assert free.front.outputs == dear.front.outputs


def test_a_move_that_is_refused_is_planned_again_later() -> None:
    """The creditor stands still when the first plan is made, and its old view is held up."""
    cluster = VirtualCluster(spec_of(), ROWS)
    cluster.start()
    cluster.loop.at(3.9, lambda: cluster.pause("mixed-1", 3.0))
    while cluster.front.num_done < len(ROWS) and cluster.go_on():
        pass
    assert cluster_figures(cluster)["sections"]["lent"] > 0
    assert waits(cluster) > 2.0, "no plan without a word of both"
    assert cluster.front.outputs == run_of().front.outputs


def test_orders_of_an_old_plan_do_no_harm() -> None:
    """The debtor is told of more than there is, of others, and twice."""
    cluster = VirtualCluster(spec_of(), ROWS)
    cluster.start()
    for at, request, target, count in (
        (1.0, "0", "mixed-1", 99),
        (1.1, "1", "mixed-0", 2),
        (1.2, "0", "mixed-1", 99),
        (9.0, "2", "mixed-1", 1),
    ):
        tell = (cluster, request, target, count)
        cluster.loop.at(at, lambda tell=tell: order(*tell))  # type: ignore[misc]
    while cluster.front.num_done < len(ROWS) and cluster.go_on():
        pass
    assert cluster.front.outputs == run_of().front.outputs
    assert not cluster_figures(cluster)["sections"]["lost"]


@pytest.mark.parametrize("name", ["mixed-0", "mixed-1"])
def test_after_a_death_on_either_side_all_requests_are_answered(name: str) -> None:
    cluster = VirtualCluster(spec_of(), ROWS)
    cluster.start()
    cluster.loop.at(7.0, lambda: cluster.crash(name))
    while cluster.front.num_done < len(ROWS) and cluster.go_on():
        pass
    assert cluster.front.outputs == run_of().front.outputs


def test_a_section_is_what_the_heartbeat_counts() -> None:
    """``longest`` names what can go: whole computed sections but the last one."""
    cluster = VirtualCluster(spec_of(hosts={}), [row(5 * SECTION_TOKENS, 600)])
    cluster.start()
    seen = set()
    while cluster.front.num_done < 1 and cluster.go_on():
        for beat in (
            one.core.counters.load_stats(one.core.step) for one in cluster.instances.values()
        ):
            seen |= {(one.req_id, one.num_blocks) for one in beat.longest}
    assert ("0", 5) in seen and ("0", 6) in seen and ("0", 7) not in seen
    size_bytes = section_bytes(LAYOUT.groups)
    assert size_bytes * (POOL_TOKENS // SECTION_TOKENS) == LAYOUT.pool_bytes


@pytest.mark.parametrize(
    ("moves", "lends", "is_quick"),
    [("none", 0, False), ("requests", 0, False), ("loans", 1, True), ("all", 1, True)],
)
def test_only_what_the_setting_names_moves(moves: Relief, lends: int, is_quick: bool) -> None:
    run = run_of(moves=moves)
    assert min(1, cluster_figures(run)["sections"]["lent"]) == lends
    assert (waits(run) < waits(run_of(hosts=None)) / 2) == is_quick
    assert run.front.outputs == run_of().front.outputs


GROWING = [row(4000, 4000, at=0.0), row(100, 100, at=0.1), row(2000, 2000, at=0.2)]
"""Two requests of one instance outgrow it together, the other instance is idle."""


def test_reactive_loans_move_what_running_requests_lack_and_nothing_for_those_that_wait() -> None:
    waiting, growing = run_of(moves="reactive"), run_of(GROWING, moves="reactive")
    alone = run_of(GROWING, moves="none")
    assert waits(waiting) > waits(run_of(moves="loans"))
    lent = cluster_figures(growing)
    assert lent["sections"]["lent"] > 0 and not lent["roles"]["mixed"]["preemptions"]
    assert cluster_figures(alone)["roles"]["mixed"]["preemptions"] > 0
    assert growing.front.outputs == alone.front.outputs


@pytest.mark.parametrize("added_seconds", [0.0, 0.03])
def test_both_sides_of_a_loan_measure_what_copies_add_to_their_steps(added_seconds: float) -> None:
    reads = NeighbourReads(copied_seconds=added_seconds)
    cluster = VirtualCluster(spec_of(reads=reads), [row(6000, 600), row(400, 600, at=0.1)])
    cluster.start()
    cluster.loop.at(3.0, lambda: order(cluster, "0", "mixed-1", 8))
    while cluster.front.num_done < 2 and cluster.go_on():
        pass
    for instance in cluster.instances.values():
        seconds = instance.core.counters.load_stats(instance.core.step).copy_seconds
        assert seconds == pytest.approx(added_seconds, abs=1e-6)
