"""Creditors that compute in virtual time: the engine's loans by queries, at a priced round trip."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from kvell.simulator.cluster.cluster import VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from tests.mempool.agent_audit import audit_loans
from tests.simulator.cluster.planned import ROWS, run_of, spec_of, waits

APART = {"mixed-0": "a", "mixed-1": "b"}
ASKED: dict[str, Any] = {"hosts": APART, "asks": True}
DEBTOR, CREDITOR = "mixed-0", "mixed-1"


def asked(round_trip_seconds: float, held_seconds: float = 0.0, **changes: Any) -> VirtualCluster:
    """A run whose steps wait for so long, and whose creditors read a token in so long."""
    costs = structs.replace(
        spec_of().costs,
        asked_step_seconds=round_trip_seconds,
        asked_row_seconds=0.0,
        held_token_seconds=held_seconds,
        pair_seconds=0.0,
    )
    return run_of(costs=costs, **ASKED, **changes)


def mean_step(cluster: VirtualCluster, name: str) -> float:
    counts = cluster.instances[name].counts
    return counts.busy_seconds / counts.steps


def test_a_short_request_waits_less_where_creditors_compute_for_the_long_one() -> None:
    lent, alone = run_of(**ASKED), run_of(hosts=None)
    sections = cluster_figures(lent)["sections"]
    assert sections["lent"] > 0 and sections["lost"] == sections["returned"] == 0
    assert waits(lent) < waits(alone) / 2
    assert lent.front.outputs == alone.front.outputs
    assert not lent.instances[DEBTOR].agent.neighbours, "nothing is read in place"


def test_instances_of_two_hosts_lend_nothing_unless_they_ask() -> None:
    assert not cluster_figures(run_of(hosts=APART))["sections"]["lent"]


def test_a_debtor_waits_for_round_trips_and_a_creditor_computes_in_its_own_steps() -> None:
    free, far, dear = asked(0.0), asked(0.001), asked(0.0, 1e-6)
    assert mean_step(free, DEBTOR) == pytest.approx(0.01)
    assert mean_step(free, CREDITOR) == pytest.approx(0.01)
    assert mean_step(far, DEBTOR) > 0.01 and mean_step(far, CREDITOR) == pytest.approx(0.01)
    assert mean_step(dear, CREDITOR) > 0.01
    for run in (far, dear):
        assert run.front.outputs == free.front.outputs


def test_a_step_is_no_shorter_than_its_own_attention() -> None:
    """A wait that is shorter than the attention over the debtor's own pages costs nothing."""
    hidden = asked(1e-5, 1e-6)
    unhidden = asked(0.0, 1e-6)
    assert mean_step(hidden, DEBTOR) < mean_step(unhidden, DEBTOR) + 1e-5


def faulty(happens: str) -> VirtualCluster:
    cluster = VirtualCluster(spec_of(**ASKED), ROWS)
    cluster.start()
    acts = {
        "creditor dies": lambda: cluster.crash(CREDITOR),
        "debtor dies": lambda: cluster.crash(DEBTOR),
        "creditor stands still": lambda: cluster.pause(CREDITOR, 12.0),
        "cut": lambda: cluster.network.partition([DEBTOR], [CREDITOR]),
    }
    cluster.loop.at(7.0, acts[happens])
    while cluster.front.num_done < len(ROWS) and cluster.go_on():
        pass
    return cluster


@pytest.mark.parametrize(
    "happens", ["creditor dies", "debtor dies", "creditor stands still", "cut"]
)
def test_after_a_fault_on_either_side_all_requests_are_answered(happens: str) -> None:
    run = faulty(happens)
    assert run.front.outputs == run_of(hosts=None).front.outputs
    if happens != "debtor dies":  # a closed connection is seen before the next step asks
        missed, lost = run.instances[DEBTOR].counts.missed, cluster_figures(run)["sections"]["lost"]
        assert missed or lost if happens == "creditor dies" else missed
    for instance in run.instances.values():
        assert audit_loans(instance.agent) == []


def test_a_creditor_answers_one_query_after_another() -> None:
    cluster = VirtualCluster(replace(spec_of(**ASKED)), ROWS)
    cluster.start()
    creditor = cluster.instances[CREDITOR]
    assert [creditor.answer(0.5), creditor.answer(0.25)] == [0.5, 0.75]
    cluster.pause(CREDITOR, 1.0)
    assert creditor.answer(0.5) is None
