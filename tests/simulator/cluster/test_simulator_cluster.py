"""Whole instances in virtual time: what is computed where, what crosses, and when."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from kvell.engine.core.journal import PlanAsked
from kvell.engine.protocol.messages import HEARTBEAT_SECONDS, Cancel, Event, Heartbeat
from kvell.mempool.entries import PeerLost, PullEnded
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.receiving import Receiving
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.cluster.instance import REVOKED, STOPPED, UNREACHED, Links
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import RequestId
from tests.depth import some
from tests.simulator.cluster.runs import ONE_EACH, QUIET, run_of
from tests.simulator.cluster.schedules import Fault, Run, Scenario, scenarios
from tests.simulator.cluster.schedules import row as drawn_row
from tests.simulator.replays import MACHINE, busy_rows, layout_of, limits_of, make_replay, row

LAYOUT = layout_of((0, 2), (8, 1))
LINKS = Links(Link(0.001, 1e6))


def num_refused(cluster: VirtualCluster) -> int:
    return cluster.front.num_done - len(cluster.front.ends)


def spec_of(counts: Mapping[str, int], links: Links = LINKS, **more: Any) -> ClusterSpec:
    return ClusterSpec(counts, LAYOUT, limits_of(LAYOUT), MACHINE, links, **more)


def times(cluster: VirtualCluster) -> list[tuple[float | None, ...]]:
    return [
        (one.came_seconds, one.first_token_seconds, one.finish_seconds, one.hit_tokens)
        for one in cluster.front.requests
    ]


def ends_of_pulls(run: Run) -> list[str]:
    instances = [*run.cluster.past, *run.cluster.instances.values()]
    return [
        entry.problem
        for one in instances
        if one.record is not None
        for entry in one.record.journal.entries
        if isinstance(entry, PullEnded)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_one_mixed_instance_is_what_the_replay_of_one_is(seed: int) -> None:
    rows = busy_rows(seed)
    alone = make_replay(LAYOUT, rows, "trace")
    cluster = run_of(spec_of({"mixed": 1}), rows)
    expected = [
        (one.came_seconds, one.first_token_seconds, one.finish_seconds, one.hit_tokens)
        for one in alone.requests
    ]
    assert np.allclose(np.array(times(cluster), float), np.array(expected, float))


def test_one_computes_the_prompt_and_the_other_the_answer() -> None:
    cluster = run_of(spec_of(ONE_EACH), [row(50, 6)])
    computed = {name: one.counts.computed_tokens for name, one in cluster.instances.items()}
    assert computed == {"prefill-0": 50, "decode-0": 5}
    figures = cluster_figures(cluster)
    assert (figures["requests_moved"], figures["requests_finished"]) == (1, 1)
    held = {group.name: -(-50 // 4) for group in LAYOUT.groups if not group.window_tokens}
    held |= {group.name: 3 for group in LAYOUT.groups if group.window_tokens}
    there = sum(held[g.name] * g.page_stride_bytes for g in LAYOUT.groups)
    assert figures["moved_bytes"] == there


def test_pages_take_their_bytes_over_the_links_bandwidth() -> None:
    """The answer's second token waits for them; the first does not."""
    found = {}
    for bandwidth in (math.inf, 1e5, 1e4):
        cluster = run_of(spec_of(ONE_EACH, Links(Link(0.001, bandwidth))), [row(50, 6)])
        found[bandwidth] = cluster.front.requests[0]
        moved = cluster.network.pulled_bytes["decode-0"]
    fast, slow, slower = (found[one] for one in (math.inf, 1e5, 1e4))
    assert fast.first_token_seconds == slow.first_token_seconds == slower.first_token_seconds
    ends = [one.finish_seconds or math.nan for one in (fast, slow, slower)]
    assert ends[1] - ends[0] == pytest.approx(moved / 1e5)
    assert ends[2] - ends[0] == pytest.approx(moved / 1e4)


def test_pulls_over_one_link_wait_for_each_other() -> None:
    rows = [row(40, 3, at=0.0), row(40, 3, at=0.0)]
    links = Links(Link(0.0, 1e4))
    one = run_of(spec_of(ONE_EACH, links), rows[:1])
    two = run_of(spec_of(ONE_EACH, links), rows)
    crossed = one.network.pulled_bytes["decode-0"] / 1e4
    alone = one.front.requests[0].finish_seconds or math.nan
    last = max(each.finish_seconds or math.nan for each in two.front.requests)
    assert last >= alone + crossed


@pytest.mark.parametrize("counts", [{"mixed": 3}, {"prefill": 1, "decode": 2}])
@pytest.mark.parametrize("seed", range(3))
def test_equal_runs_are_equal(counts: Mapping[str, int], seed: int) -> None:
    links = Links(Link(0.01, 1e6, jitter_seconds=0.1), Link(0.01, loss=0.1, duplication=0.2))
    runs = [run_of(spec_of(counts, links, seed=seed), busy_rows(seed)) for _ in range(2)]
    assert times(runs[0]) == times(runs[1])
    assert cluster_figures(runs[0]) == cluster_figures(runs[1])


def test_another_seed_loses_other_messages() -> None:
    links = Links(Link(0.01), Link(0.01, loss=0.4))
    lost = [
        run_of(spec_of(ONE_EACH, links, seed=seed), busy_rows(1)).transport.total()
        for seed in range(4)
    ]
    assert len({(one.sent, one.lost) for one in lost}) > 1


@pytest.mark.parametrize(("pd_caching", "hits"), [(0, 0), (1, 40), (2, 40), (3, 44)])
def test_what_a_next_turn_finds_at_the_prefill_instance(pd_caching: Any, hits: int) -> None:
    first = TraceRow(0.0, 40, 5, session="s")
    then = TraceRow(60.0, 50, 5, session="s", continues=True)
    cluster = run_of(spec_of(ONE_EACH, pd_caching=pd_caching), [first, then])
    assert cluster.front.requests[1].hit_tokens == hits


def test_without_caching_mixed_instances_cache_nothing() -> None:
    rows = [row(40, 3, [1, 2, 3]), row(40, 3, [1, 2, 3], at=50.0)]
    hits = [
        run_of(spec_of({"mixed": 1}, pd_caching=caching), rows).front.requests[1].hit_tokens
        for caching in (0, 3)
    ]
    assert hits == [0, 12]


def test_requests_go_to_instances_as_the_router_says() -> None:
    rows = [replace(row(20, 4, at=30.0 * i), session="s") for i in range(6)]
    steps = {
        routing: [
            one.counts.steps
            for one in run_of(
                spec_of({"mixed": 3}, routing=routing), rows, sessions=False
            ).instances.values()
        ]
        for routing in ("round-robin", "session")
    }
    assert min(steps["round-robin"]) > 0
    assert sorted(steps["session"])[:2] == [0, 0]


def test_a_prompt_that_can_never_be_served_is_refused() -> None:
    cluster = run_of(spec_of(ONE_EACH), [row(20, 3), row(4_000, 3, at=1.0)])
    figures = cluster_figures(cluster)
    assert (figures["requests_finished"], figures["requests_refused"]) == (1, 1)
    assert num_refused(cluster) == 1


def test_requests_beyond_the_line_are_not_let_in() -> None:
    from kvell.engine.protocol.messages import CREDITS

    rows = [row(2, 1) for _ in range(CREDITS + 3)]
    cluster = run_of(spec_of({"mixed": 1}, max_waiting=1), rows)
    assert num_refused(cluster) == 2


def test_the_front_hears_of_free_memory() -> None:
    cluster = run_of(spec_of({"mixed": 2}, routing="most-free-memory"), busy_rows(2))
    lines = cluster.front.queue.lines.values()
    assert all(0 < line.free_bytes <= LAYOUT.pool_bytes for line in lines)
    assert all(one.counts.steps for one in cluster.instances.values())


def test_instances_with_nothing_to_do_beat_too_and_a_cluster_at_rest_ends() -> None:
    """Who decides on moves must know what memory others have that have computed nothing yet."""
    cluster = VirtualCluster(spec_of({"mixed": 2}), [row(4, 10)])
    said: list[tuple[str, float]] = []
    heard = cluster.front.queue.on_event

    def hears(name: str, event: Event, now: float) -> list[Any]:
        if isinstance(event, Heartbeat):
            said.append((name, now))
        return heard(name, event, now)

    cluster.front.queue.on_event = hears  # type: ignore[method-assign,assignment]
    cluster.run()
    ends_seconds = cluster.loop.now_seconds
    assert ends_seconds > 4 * HEARTBEAT_SECONDS
    [idle] = [name for name, one in cluster.instances.items() if not one.counts.steps]
    beats = [at for name, at in said if name == idle]
    assert len(beats) >= ends_seconds / HEARTBEAT_SECONDS - 2
    while cluster.go_on():
        assert cluster.loop.now_seconds < ends_seconds + 2 * HEARTBEAT_SECONDS


def gone(**changes: Any) -> Run:
    return Run(Scenario(**{**QUIET, **changes})).go()


def test_a_quiet_cluster_moves_every_request() -> None:
    run = gone(rows=[drawn_row(0.01 * i, 20, 6) for i in range(6)])
    assert run.cluster.front.moved == 6 and run.audits > 50
    assert ends_of_pulls(run).count("") >= 6


@pytest.mark.parametrize("name", range(2))
@pytest.mark.parametrize("at", [0.0, 0.01, 0.03, 0.05, 0.07, 0.09, 0.11])
def test_a_crash_at_any_moment_loses_no_token(name: int, at: float) -> None:
    run = gone(faults=[Fault(at, "crash", name, 0)], page_seconds=0.002)
    assert len(run.cluster.past) == 1
    assert run.cluster.front.ends[0].reason == "length"


def test_a_request_whose_instances_die_again_and_again_ends_with_the_reason() -> None:
    crashes = [Fault(0.03 + 0.1 * i, "crash", name, 0) for i in range(6) for name in (0, 1)]
    run = gone(faults=crashes)
    assert len(run.cluster.past) > 2
    end = run.cluster.front.ends[0]
    assert end.reason == "error" and "retried twice" in end.message


def test_incarnations_have_their_own_journals() -> None:
    rows = [drawn_row(0.0, 40, 14), drawn_row(1.0, 10, 3)]
    run = gone(rows=rows, faults=[Fault(0.05, "crash", 0, 0)])
    (dead,), living = run.cluster.past, run.cluster.instances["prefill-0"]
    assert dead.incarnation != living.incarnation
    for one in (dead, living):
        assert one.record is not None
        assert one.record.plans
        asked = [e for e in one.record.journal.entries if isinstance(e, PlanAsked)]
        assert len(asked) == len(one.record.plans)


def test_instances_that_cannot_reach_each_other_serve_alone() -> None:
    run = gone(faults=[Fault(0.0, "partition", 0, 1)])
    assert run.cluster.front.moved == 0
    assert run.cluster.transport.total().cut > 0
    assert run.cluster.front.ends[0].reason == "length"
    prefill = run.cluster.instances["prefill-0"].record
    assert prefill is not None
    assert any(isinstance(entry, PeerLost) for entry in prefill.journal.entries)


def test_a_pull_that_a_partition_breaks_is_told() -> None:
    run = gone(faults=[Fault(0.1, "partition", 0, 1)], page_seconds=0.05)
    assert ends_of_pulls(run) == [UNREACHED]
    assert run.cluster.front.ends[0].reason == "length"


def test_a_pull_is_stopped_when_its_request_is_cancelled() -> None:
    run = gone(faults=[Fault(0.1, "cancel", 0, 0)], page_seconds=0.05)
    assert ends_of_pulls(run) == [STOPPED]
    assert run.cluster.front.ends[0].reason == "cancelled"


def test_a_copy_that_outlives_its_right_does_not_count() -> None:
    """Nobody stops it: the message that would is lost or late."""
    scenario = Scenario(**{**QUIET, "page_seconds": 0.05})
    run = Run(scenario)
    cluster = run.cluster
    cluster.start()
    while not cluster.instances["decode-0"].counts.pulls:
        assert cluster.go_on()
    late = Link(latency_seconds=20.0)
    cluster.transport.set_link("prefill-0#1", "decode-0#2", late)
    cluster.instances["prefill-0"].take(Cancel(RequestId("0")))
    while cluster.go_on():
        pass
    assert ends_of_pulls(run) == [REVOKED]


def test_a_migration_moves_a_request_that_decodes() -> None:
    run = gone(counts={"mixed": 2}, faults=[Fault(0.07, "migrate", 0, 1)])
    assert run.cluster.front.moved == 1
    assert all(one.counts.computed_tokens for one in run.cluster.instances.values())


def test_a_prefix_comes_from_a_third_instance() -> None:
    rows = [drawn_row(0.0, 40, 2, shared=30), drawn_row(5.0, 40, 2, shared=30)]
    alone = gone(counts={"mixed": 2}, rows=rows, routing="round-robin")
    asks = gone(counts={"mixed": 2}, rows=rows, routing="round-robin", pulls=[-1, 0])
    computed = [
        sum(one.counts.computed_tokens for one in run.cluster.instances.values())
        for run in (alone, asks)
    ]
    assert computed[1] < computed[0] - 20
    assert ends_of_pulls(asks) == [""]


# ------------------------------------------------------- whether a fault would be seen


def test_a_copy_that_counts_without_its_right_is_noticed() -> None:
    """Pages are given to others while they are copied: what is copied then is somebody else's."""
    rows = [drawn_row(0.0, 40, 14), *(drawn_row(0.12 + 0.01 * i, 40, 4) for i in range(8))]
    run = Run(Scenario(**{**QUIET, "rows": rows, "page_seconds": 0.05, "large": 16}))
    run.cluster.start()
    prefill, decode = (run.cluster.instances[name] for name in ("prefill-0", "decode-0"))
    while not decode.counts.pulls:
        assert run.cluster.go_on()
    for page in run.cluster.instances["prefill-0"].device.memory:  # type: ignore[attr-defined]
        page[:] = 7
    assert prefill.rights
    with pytest.raises(AssertionError, match="lost token"):
        while run.cluster.go_on():
            pass


def cancelled_in_the_middle(large: int, at: float) -> Run:
    """Pulls are stopped while their pages are wanted by others."""
    rows = [drawn_row(0.0, 40, 8)]
    rows += [drawn_row(0.05 + 0.01 * i, 30, 8, shared=4, family=1) for i in range(6)]
    quiet = {**QUIET, "counts": {"prefill": 2, "decode": 1}, "pd_caching": 0}
    cancels = [Fault(at, "cancel", i, 0) for i in range(2)]
    more = {"rows": rows, "faults": cancels, "large": large, "page_seconds": 0.005}
    return Run(Scenario(**{**quiet, **more}))


@pytest.mark.parametrize("sizes", [(16,), pytest.param((12, 16, 24), marks=pytest.mark.long)])
def test_pages_that_a_stopped_copy_still_writes_are_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """And if they were given away at once, that would be seen."""
    cases = [(large, 0.07 + 0.02 * i) for large in sizes for i in range(12)]
    stopped = [ends_of_pulls(cancelled_in_the_middle(*case).go()) for case in cases]
    assert sum(ends.count(STOPPED) for ends in stopped) > 3 * len(sizes)
    ended = Receiving.end

    def released(self: Receiving, transfer: Transfer) -> list[Action]:
        self._holds.release(self.open[transfer].owner)
        return ended(self, transfer)

    monkeypatch.setattr(Receiving, "end", released)

    def is_seen(case: tuple[int, float]) -> bool:
        try:
            cancelled_in_the_middle(*case).go()
        except AssertionError:
            return True
        return False

    assert any(is_seen(case) for case in cases)


@given(scenarios)
@some()
def test_whatever_happens_every_request_is_answered_rightly_or_refused(scenario: Scenario) -> None:
    Run(scenario).go()
