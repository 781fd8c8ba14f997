"""Whole replays: what the loop guarantees for any trace."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvell.clock import VirtualClock
from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, replay
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.requests.plan import StepPlan
from kvell.memory import MemoryCore, audit, create_core
from kvell.simulator.cluster.meter import MeteredCore
from kvell.simulator.traces.rows import TraceRow
from tests.engine.swapping import Always
from tests.simulator.replays import (
    MACHINE,
    Replay,
    busy_rows,
    layers_in,
    layout_of,
    limits_of,
    make_replay,
    row,
)

MIXED = ((0, 1), (9, 2))
CLOCKED = ("wall_seconds", "manager_us_per_step", "manager_us_per_request_step")


def figures(run: Replay) -> dict[str, Any]:
    return {name: value for name, value in run.report().items() if name not in CLOCKED}


class TestWholeTraces:
    @pytest.mark.parametrize("arrivals", ["start", "trace"])
    @pytest.mark.parametrize("seed", range(3))
    def test_every_request_ends_with_its_output(self, seed: int, arrivals: Any) -> None:
        rows = busy_rows(seed)
        run = make_replay(layout_of(*MIXED, large_pages=40), rows, arrivals)
        report = run.report()
        assert report["requests_finished"] == len(rows)
        assert all(r.finish_step is not None for r in run.requests)
        for figures, trace_row in zip(run.requests, rows, strict=True):
            assert figures.admitted_step is not None
            assert figures.first_token_step is not None
            assert figures.finish_step is not None
            assert figures.admitted_step <= figures.first_token_step
            taken = figures.finish_step - figures.first_token_step
            assert taken >= trace_row.output_tokens - 1

    def test_pressure_preempts_and_prefixes_hit(self) -> None:
        report = make_replay(layout_of(*MIXED, large_pages=24), busy_rows(0)).report()
        assert report["preemptions"] > 0
        assert report["hit_rate"] > 0.02
        assert 0 < report["stranded"] < 1
        assert 0 < report["waste"] < 1
        assert report["batch_saturated_mean"] >= report["batch_mean"]

    @pytest.mark.parametrize(
        ("large_pages", "requests", "is_short"), [(24, 8, True), (900, 8, False), (900, 20, False)]
    )
    def test_short_of_memory_is_neither_short_of_seats_nor_of_tokens(
        self, large_pages: int, requests: int, is_short: bool
    ) -> None:
        rows = [row(60, 4) for _ in range(requests)]  # 8 seats, 64 tokens a step
        report = make_replay(layout_of(*MIXED, large_pages=large_pages), rows).report()
        assert report["batch_saturated_mean"] > 0
        assert (report["short_of_memory"] > 0) is is_short

    def test_who_waits_for_a_prefix_is_not_short_of_memory(self) -> None:
        rows = [row(84, 1, range(20)), row(84, 1, range(20))]
        report = make_replay(layout_of((0, 1), large_pages=900), rows).report()
        assert report["rungs"]["wait_for_prefix"] > 0
        assert report["short_of_memory"] == 0

    @pytest.mark.parametrize("look_every", [3, 1000])
    def test_looking_seldom_changes_figures_of_memory_alone(self, look_every: int) -> None:
        layout = layout_of(*MIXED, large_pages=24)
        every = make_replay(layout, busy_rows(0))
        seldom = make_replay(layout, busy_rows(0), look_every=look_every)
        of_memory = {"waste", "stranded", "waste_saturated", "stranded_saturated", "groups"}
        told, again = figures(every), figures(seldom)
        assert {name for name in told if told[name] != again[name]} == of_memory
        assert every.requests == seldom.requests
        looked = [sample.groups for sample in every.means.samples]
        held = [looked[step // look_every * look_every] for step in range(len(looked))]
        assert [sample.groups for sample in seldom.means.samples] == held

    def test_deterministic(self) -> None:
        runs = [make_replay(layout_of(*MIXED, large_pages=40), busy_rows(1)) for _ in range(2)]
        assert figures(runs[0]) == figures(runs[1])
        assert runs[0].requests == runs[1].requests

    def test_the_journal_gives_the_same_plans(self) -> None:
        layout, rows, journal = layout_of(*MIXED, large_pages=40), busy_rows(2), Journal()
        run = make_replay(layout, rows, journal=journal)
        incarnation = run.instance.incarnation
        again = EngineCore(create_core(layout), limits_of(layout), frozenset(), incarnation)
        plans: list[StepPlan] = replay(journal.entries, again)
        assert len(plans) == run.report()["steps"]
        assert not again.has_work
        assert again.stats() == run.engine.stats()
        first = EngineCore(create_core(layout), limits_of(layout), frozenset())
        assert replay(journal.entries, first) == plans

    def test_hits_are_those_of_the_first_admission(self) -> None:
        rows = [row(9, 1, [1, 2]), row(9, 1, [1, 2]), row(9, 1, [1, 3]), row(9, 1, [4, 5])]
        run = make_replay(layout_of((0, 1)), rows)
        assert [r.hit_tokens for r in run.requests] == [0, 8, 4, 0]
        assert run.report()["hit_rate"] == 12 / 36

    def test_repeated_prompts_share_named_blocks_only(self) -> None:
        run = make_replay(layout_of((0, 1)), [row(20, 2, [1]), row(20, 2, [1]), row(20, 2)])
        assert [r.hit_tokens for r in run.requests] == [0, 4, 0]


class TestRefusals:
    def test_longer_than_the_pool(self) -> None:
        run = make_replay(layout_of((0, 1), large_pages=4), [row(20, 1), row(8, 2), row(10, 7)])
        report = run.report()
        assert (report["requests_refused"], report["requests_finished"]) == (2, 1)
        assert report["max_model_len"] == 16
        assert [r.finish_step is None for r in run.requests] == [True, False, True]

    def test_nothing_but_refused(self) -> None:
        report = make_replay(layout_of((0, 1), large_pages=4), [row(20, 1)]).report()
        assert (report["steps"], report["batch_mean"], report["waste"]) == (0, 0.0, 0.0)

    def test_by_the_engine_itself(self) -> None:
        layout = layout_of((0, 1))
        rows = [replace(row(5, 1, at=float(i)), session="s") for i in range(3)]
        limits = replace(limits_of(layout), vocab_size=1)
        core = create_core(layout)
        run = Replay(core, layers_in(layout), limits, rows, "trace", MACHINE, VirtualClock())
        run.run()
        assert run.report()["requests_refused"] == 3
        assert run.loop.now_seconds == 2.0


class TestVirtualTime:
    def test_steps_take_what_the_profile_says(self) -> None:
        run = make_replay(layout_of((0, 1)), [row(5, 3)])
        assert run.report()["virtual_seconds"] == pytest.approx(3.0, abs=1e-3)

    def test_requests_come_at_their_time(self) -> None:
        rows = [row(5, 3, at=0.0), row(5, 1, at=1.5), row(5, 1, at=100.0)]
        run = make_replay(layout_of((0, 1)), rows, "trace")
        assert [r.admitted_step for r in run.requests] == [1, 3, 4]
        assert run.loop.now_seconds == pytest.approx(101.0, abs=1e-3)
        # The idle time between has no steps.
        assert run.report()["steps"] == 4

    def test_start_ignores_arrivals(self) -> None:
        run = make_replay(layout_of((0, 1)), [row(5, 1, at=0.0), row(5, 1, at=1e6)])
        assert [r.admitted_step for r in run.requests] == [1, 1]
        assert run.loop.now_seconds < 2

    def test_what_comes_during_a_step_did_not_wait_in_it(self) -> None:
        run = make_replay(layout_of((0, 1)), [row(5, 1), row(5, 1, at=0.5)], "trace")
        assert not any(sample.leaves_waiting for sample in run.means.samples)


class TestMeteredCore:
    def test_watches_and_changes_nothing(self) -> None:
        layout = layout_of(*MIXED, large_pages=40)
        bare, metered = create_core(layout), MeteredCore(create_core(layout))
        for core in (bare, metered):
            engine = EngineCore(core, limits_of(layout), frozenset())
            replay(journal_of(20), engine)
        assert metered.snapshot() == bare.snapshot()
        assert audit(layout, metered.snapshot()) == []
        assert metered.nanoseconds > 0

    def test_looking_is_not_managing(self) -> None:
        metered = MeteredCore(create_core(layout_of((0, 1))))
        metered.totals()
        metered.snapshot()
        assert metered.nanoseconds == 0


def journal_of(count: int) -> list[Any]:
    journal = Journal()
    make_replay(layout_of(*MIXED, large_pages=40), busy_rows(5, count), journal=journal)
    return journal.entries


def test_progress_reaches_the_end() -> None:
    layout, seen = layout_of((0, 1)), list[float]()
    rows = busy_rows(0)
    limits, core = limits_of(layout), create_core(layout)
    fresh = Replay(core, layers_in(layout), limits, rows, "start", MACHINE, VirtualClock())
    fresh.run(seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_prompts_come_however_many_are_parked() -> None:
    """One every two seconds, and eight seats: each new prompt goes ahead of the decodes."""
    layout = layout_of((0, 1), large_pages=200)
    rows = [row(8 + i % 3, 60, at=2.0 * i) for i in range(40)]

    def swap(core: MemoryCore) -> Swapping:
        return Swapping(core, PageBuffer(layout.groups, 800), Always())

    def park(core: MemoryCore, swapping: Swapping) -> Parking:
        return Parking(core, swapping, CpuBuffer(800, 800, is_fixed=True), 4)

    core, limits = create_core(layout), limits_of(layout)
    run = Replay(
        core,
        layers_in(layout),
        limits,
        rows,
        "trace",
        MACHINE,
        VirtualClock(),
        swapping=swap,
        parking=park,
    )
    run.run()
    waited = [
        one.first_token_seconds - one.came_seconds
        for one in run.requests
        if one.first_token_seconds is not None and one.came_seconds is not None
    ]
    assert len(waited) == len(rows)
    assert max(waited) < 5
    assert run.report()["cpu_buffer"]["parkings"] > 20
    assert run.report()["max_running"] == limits.max_num_seqs


LAYERS = ((16, 2), (0, 1))


def articles(seed: int, count: int = 12, questions: int = 8) -> list[TraceRow]:
    """Articles of eighty tokens, and a few tokens for the question."""
    draw = np.random.default_rng(seed)
    order = draw.permutation(np.repeat(np.arange(count), questions)).tolist()
    return [
        row(82 + int(draw.integers(6)), 2, range(20 * a, 20 * a + 20), at=float(i))
        for i, a in enumerate(order)
    ]


def report(rows: list[TraceRow], *, common_pool: bool, share: float | None = 0.5) -> dict[str, Any]:
    layout = layout_of(*LAYERS, large_pages=60)
    limits = replace(
        limits_of(layout),
        common_pool=common_pool,
        common_pool_chunk_tokens=8,
        common_pool_share=share,
    )
    run = Replay(
        create_core(layout), layers_in(layout), limits, rows, "start", MACHINE, VirtualClock()
    )
    run.run()
    return run.report()


def test_more_hits_where_articles_push_each_other_out() -> None:
    rows = articles(seed=1)
    off, on = report(rows, common_pool=False), report(rows, common_pool=True)
    assert on["requests_finished"] == off["requests_finished"] == len(rows)
    assert off["hit_rate"] < on["hit_rate"]
    assert on["protected_prefixes"] > 0
    assert off["protected_prefixes"] == 0


def test_leases_are_no_running_requests() -> None:
    run = report(articles(seed=2), common_pool=True)
    assert run["batch_mean"] <= run["max_running"]


def test_the_same_trace_gives_the_same_report() -> None:
    rows = articles(seed=3)
    first, second = (report(rows, common_pool=True, share=None) for _ in range(2))
    for name in ("hit_rate", "virtual_seconds", "steps", "rungs", "protected_tokens"):
        assert first[name] == second[name]
