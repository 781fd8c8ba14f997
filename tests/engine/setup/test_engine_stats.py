"""Gauges and counters: operators see what happened."""

from dataclasses import replace

from kvell.engine.core.core import EngineCore
from kvell.memory import create_core
from tests.engine.conftest import make_layout
from tests.engine.traffic import Traffic, limits

SHARED = list(range(20))


def served() -> Traffic:
    traffic = Traffic(make_layout((0, 9), 40), limits())
    traffic.submit("a", [*SHARED, 1], max_tokens=4)
    traffic.run()
    traffic.submit("b", [*SHARED, 2], max_tokens=6)
    traffic.run()
    return traffic


def test_a_fresh_engine_has_done_nothing() -> None:
    core = EngineCore(create_core(make_layout((0, 9), 40)), limits(), frozenset(), incarnation=7)
    stats = core.stats()
    assert (stats.incarnation, stats.step, stats.running, stats.waiting) == (7, 0, 0, 0)
    assert stats.empty_large_pages == stats.large_pages == 40
    assert stats.kv_cache_usage == 0
    assert not any(stats.finished.values())
    assert not any(stats.rungs.values())
    assert [g.name for g in stats.groups] == ["full", "sliding(9)"]


def test_prompts_outputs_queries_and_hits_are_counted() -> None:
    stats = served().core.stats()
    assert stats.prompt_tokens == stats.prefix_cache_queries == 42
    assert stats.output_tokens == 10
    assert stats.prefix_cache_hits == 20
    assert [g.hit_tokens for g in stats.groups] == [20, 8], "a window of 9 takes two pages"
    assert stats.finished == {"stop": 0, "length": 2, "cancelled": 0, "refused": 0}


def test_a_finished_engine_holds_no_used_page_but_cached_ones() -> None:
    stats = served().core.stats()
    assert stats.kv_cache_usage == 0
    assert all(g.used_pages == 0 for g in stats.groups)
    assert all(g.cached_pages > 0 for g in stats.groups)
    assert stats.empty_large_pages < stats.large_pages


def test_usage_is_the_bytes_of_used_pages() -> None:
    traffic = Traffic(make_layout((0, 9), 40), limits())
    traffic.submit("a", SHARED)
    traffic.step()
    stats = traffic.core.stats()
    used = [
        g.used_pages * spec.page_stride_bytes
        for g, spec in zip(stats.groups, traffic.layout.groups, strict=True)
    ]
    assert stats.groups[0].used_pages == 5
    assert stats.kv_cache_usage == sum(used) / traffic.layout.pool_bytes
    assert 0 < stats.kv_cache_usage < 1


def test_steps_are_counted_by_their_tokens() -> None:
    stats = served().core.stats()
    assert sum(stats.steps_by_size) == stats.step
    assert stats.step_tokens == 42 - 20 + 10 - 2, "prompts less hits, outputs less the last ones"


def test_groups_say_their_sizes() -> None:
    traffic = served()
    stats, layout = traffic.core.stats(), traffic.layout
    assert stats.large_page_bytes == layout.large_page_bytes
    for group, spec in zip(stats.groups, layout.groups, strict=True):
        assert group.page_tokens == spec.page_tokens
        assert group.most_pages * group.page_bytes == layout.pool_bytes
        assert group.unwritten_pages == group.stranded_pages == 0, "nobody uses a page"


def test_running_waiting_and_decoding_are_told_apart() -> None:
    traffic = Traffic(make_layout((0, 9), 40), limits(batched=24, seats=2))
    for name in ("a", "b", "c"):
        traffic.submit(name, [*SHARED[::-1], ord(name) - 90])
    assert (len(traffic.core.running), traffic.core.counters.num_waiting) == (0, 3)
    traffic.step()
    assert sum(one.is_decoding for one in traffic.core.running) == 1
    stats = traffic.core.stats()
    assert stats.running + stats.waiting == 3
    traffic.run()
    assert traffic.core.max_running == 2


def test_preemptions_and_evictions_are_counted() -> None:
    traffic = Traffic(make_layout((0,), 8), limits())
    traffic.submit("old", SHARED[:8], max_tokens=16)
    traffic.submit("young", SHARED[8:17], max_tokens=15)
    traffic.run()
    stats = traffic.core.stats()
    assert stats.preemptions == stats.rungs["preempt"] == 1
    assert stats.prompt_tokens == 17, "a prompt is counted once"
    assert stats.groups[0].evicted_pages > 0


def test_counters_never_fall() -> None:
    traffic = Traffic(make_layout((0, 9), 14), limits(batched=8))
    for n in range(4):
        traffic.submit(f"q{n}", [n, *SHARED[: 4 * n], n], max_tokens=9)
    last = traffic.core.stats()
    while traffic.core.has_work:
        traffic.step()
        now = traffic.core.stats()
        for name in ("step", "prompt_tokens", "output_tokens", "prefix_cache_hits", "preemptions"):
            assert getattr(now, name) >= getattr(last, name)
        assert all(now.rungs[rung] >= count for rung, count in last.rungs.items())
        last = now
    assert replace(last, running=0, waiting=0) == last
