"""What the metrics say, name by name and value by value."""

import dataclasses

import pytest

from kvell.engine.protocol import Finished, GroupStats, Stats
from kvell.server.metrics import ServerMetrics
from kvell.vocabulary import FinishReason, RequestId

STATS = Stats(
    incarnation=3,
    step=40,
    running=5,
    waiting=6,
    large_pages=7,
    empty_large_pages=2,
    kv_cache_usage=0.25,
    prompt_tokens=100,
    output_tokens=200,
    prefix_cache_queries=90,
    prefix_cache_hits=30,
    preemptions=4,
    spec_decode_drafts=12,
    spec_decode_draft_tokens=44,
    spec_decode_accepted_tokens=33,
    rungs={"own_page": 8, "preempt": 4},
    groups=(GroupStats("full", 1, 2, 4, 64), GroupStats("sliding(512)", 5, 6, 8, 32)),
)


def sample(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"kvell:{name}", {"model_name": "m", **labels})


def finished(reason: FinishReason) -> Finished:
    return Finished(RequestId("r"), 0, reason, prompt_tokens=11, output_tokens=3)


def test_requests_are_counted_by_reason() -> None:
    metrics = ServerMetrics("m")
    for reason in ("stop", "stop", "length"):
        metrics.finished(finished(reason), 2.0, 3)
    assert sample(metrics, "request_success_total", finished_reason="stop") == 2
    assert sample(metrics, "request_success_total", finished_reason="length") == 1
    assert sample(metrics, "request_success_total", finished_reason="error") is None
    assert sample(metrics, "prompt_tokens_total") == 33
    assert sample(metrics, "generation_tokens_total") == 9
    assert sample(metrics, "e2e_request_latency_seconds_sum") == 6.0


def test_times_between_tokens_are_per_token() -> None:
    metrics = ServerMetrics("m")
    metrics.first_token(0.2)
    metrics.next_tokens(0.3, 3)
    assert sample(metrics, "time_to_first_token_seconds_count") == 1
    assert sample(metrics, "time_per_output_token_seconds_count") == 3
    assert sample(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.3)
    assert sample(metrics, "time_per_output_token_seconds_bucket", le="0.1") == 3


def test_the_instances_gauges_and_counters() -> None:
    metrics = ServerMetrics("m")
    metrics.instance.stats = STATS
    metrics.instance.front_waiting = 10
    metrics.instance.restarts = 3
    expected = {
        "instance_up": 1,
        "instance_restarts_total": 3,
        "num_requests_running": 5,
        "num_requests_waiting": 16,
        "kv_cache_usage_perc": 0.25,
        "large_pages": 7,
        "empty_large_pages": 2,
        "steps_total": 40,
        "prefix_cache_queries_total": 90,
        "prefix_cache_hits_total": 30,
        "num_preemptions_total": 4,
        "spec_decode_num_drafts_total": 12,
        "spec_decode_num_draft_tokens_total": 44,
        "spec_decode_num_accepted_tokens_total": 33,
    }
    assert {name: sample(metrics, name) for name in expected} == expected


def test_groups_and_rungs_have_labels() -> None:
    metrics = ServerMetrics("m")
    metrics.instance.stats = STATS
    assert sample(metrics, "group_used_pages", group="full") == 1
    assert sample(metrics, "group_cached_pages", group="sliding(512)") == 6
    assert sample(metrics, "group_evicted_pages_total", group="full") == 4
    assert sample(metrics, "group_prefix_cache_hits_total", group="sliding(512)") == 32
    assert sample(metrics, "ladder_rungs_total", rung="own_page") == 8
    assert sample(metrics, "ladder_rungs_total", rung="preempt") == 4


def test_without_an_instance_only_what_is_known_is_said() -> None:
    metrics = ServerMetrics("m")
    assert sample(metrics, "instance_up") == 0
    assert sample(metrics, "num_requests_running") is None


def test_two_servers_in_one_process_share_nothing() -> None:
    one, other = ServerMetrics("m"), ServerMetrics("m")
    one.first_token(1.0)
    assert sample(other, "time_to_first_token_seconds_count") == 0


def test_the_text_format_carries_every_series_of_the_stats() -> None:
    metrics = ServerMetrics("m")
    metrics.instance.stats = dataclasses.replace(STATS, groups=(), rungs={})
    text = metrics.render().decode()
    assert 'kvell:num_requests_running{model_name="m"} 5.0' in text
    assert "# TYPE kvell:num_preemptions_total counter" in text
