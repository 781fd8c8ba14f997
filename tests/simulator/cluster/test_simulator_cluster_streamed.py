"""Clusters in virtual time whose pages cross while steps compute."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kvell.mempool.transfers.actions import Pull, PullRest, Send
from kvell.mempool.transfers.messages import Offer
from kvell.mempool.transfers.methods import ALWAYS, StreamCosts
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.cluster.instance import Links
from tests.simulator.cluster.runs import ONE_EACH, run_of
from tests.simulator.cluster.schedules import Fault, Run, Scenario, in_stages
from tests.simulator.cluster.schedules import row as drawn_row
from tests.simulator.replays import MACHINE, layout_of, limits_of, row

PLAIN = layout_of((0, 2), (8, 1))
LAYOUT = replace(PLAIN, groups=tuple(map(in_stages, PLAIN.groups)))
STAGES = 3


def cluster_of(bandwidth: float, streams: StreamCosts | None, prompt: int = 50) -> VirtualCluster:
    links = Links(Link(0.0, bandwidth), Link(0.0))
    spec = ClusterSpec(ONE_EACH, LAYOUT, limits_of(LAYOUT), MACHINE, links, streams=streams)
    return run_of(spec, [row(prompt, 6)], records=True)


def actions_of(cluster: VirtualCluster) -> list[Any]:
    records = [one.record for one in [*cluster.past, *cluster.instances.values()]]
    return [action for one in records if one is not None for action in one.actions]


def num_early(cluster: VirtualCluster) -> int:
    sent = [one.message for one in actions_of(cluster) if isinstance(one, Send)]
    return sum(isinstance(one, Offer) and one.stages > 0 for one in sent)


def test_what_crosses_under_the_step_is_not_waited_for() -> None:
    """Stages that cross more quickly than they are written leave the last one to wait for."""
    free, alone = cluster_of(math.inf, None), cluster_of(1e6, None)
    crossing = alone.network.pulled_bytes["decode-0"] / 1e6
    streamed = cluster_of(1e6, ALWAYS)
    (best,), (late,), (early,) = (one.front.requests for one in (free, alone, streamed))
    assert best.first_token_seconds == late.first_token_seconds == early.first_token_seconds
    assert streamed.network.pulled_bytes == alone.network.pulled_bytes
    ends = [one.finish_seconds or math.nan for one in (best, late, early)]
    assert ends[1] - ends[0] == pytest.approx(crossing)
    assert ends[2] - ends[0] == pytest.approx(crossing / STAGES, rel=0.1)


def test_a_link_that_is_slower_than_the_step_hides_what_it_carries_meanwhile() -> None:
    alone, streamed = cluster_of(1e4, None), cluster_of(1e4, ALWAYS)
    first, end = (
        [one.front.requests[0].first_token_seconds, one.front.requests[0].finish_seconds]
        for one in (alone, streamed)
    )
    hidden_seconds = (first[1] or math.nan) - (end[1] or math.nan)
    assert 0 < hidden_seconds < (end[0] or math.nan)


def test_both_offers_are_made_and_the_pull_ends_with_the_second() -> None:
    streamed, alone = cluster_of(1e6, ALWAYS), cluster_of(1e6, None)
    assert (num_early(streamed), num_early(alone)) == (1, 0)
    pulls = [one for one in actions_of(streamed) if isinstance(one, Pull)]
    assert [one.stages for one in pulls] == [STAGES]
    rests = [one for one in actions_of(streamed) if isinstance(one, PullRest)]
    assert [one.transfer for one in rests] == [pulls[0].transfer]


def test_what_does_not_pay_goes_when_it_is_computed() -> None:
    dear = StreamCosts(1e9, 1.0, 1.0, 1e-6, 0.0)
    assert num_early(cluster_of(1e6, dear)) == 0


def scenario(**more: Any) -> Scenario:
    rows = [drawn_row(0.01 * number, 20 + number, 8, shared=9) for number in range(6)]
    drawn = Scenario(
        *("all", {"prefill": 2, "decode": 2}, 50, 3, 16, 3, "least-load", 0.0, 0.0, 0.0, 0.01),
        [0.002],
        rows,
        streams=True,
    )
    return replace(drawn, **more)


def num_staged(run: Run) -> int:
    """Pulls that began while their pages were computed."""
    return sum(isinstance(one, Pull) and one.stages > 0 for one in actions_of(run.cluster))


def test_a_quiet_cluster_streams_every_request() -> None:
    run = Run(scenario()).go()
    moved = sum(isinstance(one, PullRest) for one in actions_of(run.cluster))
    assert moved == num_early(run.cluster) == num_staged(run) == len(run.texts.rows)


@pytest.mark.parametrize("at", [0.01, 0.03, 0.05, 0.07])
@pytest.mark.parametrize("name", range(4))
def test_a_crash_while_pages_cross_loses_no_token(name: int, at: float) -> None:
    run = Run(scenario(faults=[Fault(at, "crash", name, 0)])).go()
    assert num_staged(run)


@pytest.mark.parametrize("seed", range(6))
def test_hints_and_offers_that_get_lost_or_come_twice_change_no_answer(seed: int) -> None:
    run = Run(scenario(loss=0.4, duplication=0.3, jitter_seconds=0.05, seed=seed)).go()
    assert num_early(run.cluster)
