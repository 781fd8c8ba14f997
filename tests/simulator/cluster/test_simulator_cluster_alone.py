"""Instances that no other instance reaches: what one alone has, several beside each other have."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kvell.clock import VirtualClock
from kvell.engine.core.lateness import Lateness, LatenessWatch
from kvell.engine.protocol.messages import Event
from kvell.memory import create_core
from kvell.simulator.cluster.cluster import ALONE, ClusterSpec, EngineParts, VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.cluster.front import AHEAD_REQUESTS
from kvell.simulator.cluster.meter import Metering
from kvell.simulator.traces.prompts import PromptMaker, Tokens
from tests.simulator.replays import (
    MACHINE,
    Replay,
    busy_rows,
    layers_in,
    layout_of,
    limits_of,
    row,
)

LAYOUT = layout_of((0, 2), (8, 1))
METERING = Metering(layers_in(LAYOUT))


def spec_of(count: int) -> ClusterSpec:
    return ClusterSpec({"mixed": count}, LAYOUT, limits_of(LAYOUT), MACHINE)


@pytest.mark.parametrize("count", [1, 3])
def test_the_death_of_an_instance_that_none_reaches_is_survived(count: int) -> None:
    rows = busy_rows(3)
    cluster = VirtualCluster(spec_of(count), rows, metering=METERING)
    cluster.loop.at(9.5, lambda: cluster.crash("mixed-0"))
    cluster.run()
    assert cluster.front.num_finished == len(rows)
    assert len(cluster.past) == 1
    figures = cluster_figures(cluster)
    assert (figures["requests_moved"], figures["link_bytes_per_second"]) == (0, None)
    assert figures["roles"]["mixed"]["batch_mean"] > 0


def test_prompts_are_made_shortly_before_they_are_admitted() -> None:
    rows = [row(20, 2) for _ in range(100)]
    made: list[int] = []

    class Counting(PromptMaker):
        def prompt(self, index: int) -> Tokens:
            made.append(index)
            return super().prompt(index)

    spec = spec_of(1)
    cluster = VirtualCluster(spec, rows, "start", prompts=Counting(rows))
    most, seats = 0, max(AHEAD_REQUESTS, spec.limits.max_num_seqs + 1)
    cluster.start()
    while cluster.front.num_done < len(rows):
        cluster.go_on()
        admitted = sum(one.admitted_step is not None for one in cluster.front.requests)
        most = max(most, len(made) - admitted)
    assert made == list(range(100))
    assert most == seats


def test_a_turn_that_comes_when_a_step_ends_is_in_the_next_step() -> None:
    rows = [replace(row(5, 1), session="s"), row(5, 3), replace(row(5, 1), session="s")]
    cluster = VirtualCluster(spec_of(1), rows, "start")
    cluster.run()
    assert [one.admitted_step for one in cluster.front.requests] == [1, 1, 2]
    assert [one.finish_step for one in cluster.front.requests] == [1, 3, 2]


def test_requests_are_late_by_the_time_at_which_they_came() -> None:
    """The second one comes while the first step runs, and waits for its end."""
    noted: list[bool] = []

    class Watch(LatenessWatch):
        def step(self, events: Iterable[Event], now_seconds: float) -> Lateness:
            late = super().step(events, now_seconds)
            noted.append(late.ttft_late)
            return late

    parts = EngineParts(lateness=lambda: Watch(1.2, 100.0))
    VirtualCluster(spec_of(1), [row(60, 1), row(60, 1, at=0.5)], parts=parts).run()
    assert noted == [False, True]


def test_a_replay_is_a_cluster_of_one() -> None:
    rows = busy_rows(1)
    core = create_core(LAYOUT)
    limits, layers = limits_of(LAYOUT), layers_in(LAYOUT)
    alone = Replay(core, layers, limits, rows, "trace", MACHINE, VirtualClock())
    alone.run()
    cluster = VirtualCluster(ClusterSpec(ALONE, LAYOUT, limits, MACHINE), rows)
    cluster.run()
    assert cluster.front.requests == alone.requests
