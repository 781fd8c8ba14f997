"""What the metrics say, name by name and value by value."""

import dataclasses

import pytest

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.statistics import GroupStats, InstanceFacts, InstanceReport, Stats
from kvell.front.request_log import EndedRequest
from kvell.front.routes import TransferTotals
from kvell.server.metrics.front_metrics import MOST_LATEST, MOST_NOTED, ServerMetrics
from kvell.server.metrics.instance_metrics import InstanceFigures
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
    spec_decode_accepted_by_position=(20, 13),
    step_tokens=321,
    steps_by_size=(30, 4, 0, 0, 5, *(0,) * 8, 1),
    large_page_bytes=4096,
    protected_prefixes=2,
    protected_tokens=77,
    rungs={"own_page": 8, "preempt": 4},
    memory={"chunk_bytes": 64, "kv_chunks": 21, "cold_chunks": 0, "inflated": 13},
    misses={"never_seen": 6, "evicted": 2},
    device_steps={"recorded": 9, "prefill": 2},
    team={"threads": 2, "shared": 1, "thread_seconds": 8.0, "lost_seconds": 2.5},
    groups=(
        GroupStats("full", 1, 2, 4, 64, 9, 3, 0, 28, 16, 1024),
        GroupStats("sliding(512)", 5, 6, 8, 32, 1, 2, 0, 14, 16, 2048),
    ),
)


def sample(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    """A sample of the front, or of the instance ``mixed-0``."""
    keys = {"model_name": "m", **labels}
    of_front = metrics.registry.get_sample_value(f"kvell:{name}", keys)
    if of_front is not None:
        return of_front
    return metrics.registry.get_sample_value(f"kvell:{name}", {"instance": "mixed-0", **keys})


def tell(
    metrics: ServerMetrics,
    stats: Stats | None,
    facts: InstanceFacts | None = None,
    restarts: int = 0,
) -> None:
    report = None if facts is None else InstanceReport(facts)
    metrics.instances.instances = {"mixed-0": InstanceFigures(stats, report, restarts)}


def ended(reason: FinishReason, **changes: float) -> EndedRequest:
    times = {"queue_seconds": 0.5, "prefill_seconds": 1.0, "decode_seconds": 4.0} | changes
    end = Finished(
        RequestId("r"),
        0,
        reason,
        11,
        3,
        cached_tokens=8,
        preemptions=1,
        **times,  # type: ignore[arg-type]
    )
    return EndedRequest(end, 6.0, 0.25, 3, 16)


def test_requests_are_counted_by_reason() -> None:
    metrics = ServerMetrics("m")
    for reason in ("stop", "stop", "length"):
        metrics.on_ended(ended(reason))
    assert sample(metrics, "request_success_total", finished_reason="stop") == 2
    assert sample(metrics, "request_success_total", finished_reason="length") == 1
    assert sample(metrics, "request_success_total", finished_reason="error") == 0


def test_a_whole_request_is_told_by_its_stages() -> None:
    metrics = ServerMetrics("m")
    metrics.on_ended(ended("length"))
    expected = {
        "e2e_request_latency_seconds": 6.0,
        "request_queue_time_seconds": 0.75,
        "request_prefill_time_seconds": 1.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 5.0,
        "request_time_per_output_token_seconds": 2.0,
        "request_prompt_tokens": 11,
        "request_generation_tokens": 3,
        "request_prefill_kv_computed_tokens": 3,
        "request_params_max_tokens": 16,
        "request_num_preemptions": 1,
    }
    for name, value in expected.items():
        assert sample(metrics, f"{name}_count") == 1, name
        assert sample(metrics, f"{name}_sum") == value, name


def test_latest_latencies_are_taken_once_and_bounded() -> None:
    metrics = ServerMetrics("m")
    metrics.first_tokens(0.5, 1, 9)
    metrics.next_tokens(0.25, 2)
    assert metrics.take_latencies() == ((0.5,), (0.125,))
    assert metrics.take_latencies() == ((), ())
    for _ in range(10 * MOST_LATEST):
        metrics.first_tokens(1.0, 1, 1)
        metrics.next_tokens(1.0, 1)
    first, following = metrics.take_latencies()
    assert len(first) == len(following) == MOST_LATEST
    assert sample(metrics, "time_to_first_token_seconds_count") == 10 * MOST_LATEST + 1


def test_requests_without_an_answer_are_counted_but_have_no_latency() -> None:
    metrics = ServerMetrics("m")
    metrics.on_ended(ended("cancelled"))
    assert sample(metrics, "request_success_total", finished_reason="cancelled") == 1
    assert sample(metrics, "e2e_request_latency_seconds_count") == 0


def test_tokens_are_counted_as_they_come() -> None:
    metrics = ServerMetrics("m")
    metrics.first_tokens(0.2, 1, 11)
    metrics.next_tokens(0.3, 3)
    assert sample(metrics, "prompt_tokens_total") == 11
    assert sample(metrics, "generation_tokens_total") == 4
    assert sample(metrics, "time_to_first_token_seconds_count") == 1
    assert sample(metrics, "inter_token_latency_seconds_count") == 1
    assert sample(metrics, "inter_token_latency_seconds_sum") == 0.3
    assert sample(metrics, "time_per_output_token_seconds_count") == 3
    assert sample(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.3)
    assert sample(metrics, "time_per_output_token_seconds_bucket", le="0.1") == 3


def test_of_many_tokens_none_is_missed_however_seldom_somebody_looks() -> None:
    metrics = ServerMetrics("m")
    for _ in range(2 * MOST_NOTED + 3):
        metrics.next_tokens(0.3, 1)
    assert sample(metrics, "generation_tokens_total") == 2 * MOST_NOTED + 3
    assert sample(metrics, "inter_token_latency_seconds_count") == 2 * MOST_NOTED + 3
    metrics.next_tokens(0.3, 2)
    assert f'generation_tokens_total{{model_name="m"}} {2 * MOST_NOTED + 5}.0' in (
        metrics.render().decode()
    )


def test_threads_of_steps_and_what_they_lost_are_told_where_a_compiled_pass_computes() -> None:
    metrics = ServerMetrics("m")
    names = ("threads", "processors_shared", "thread_seconds_total", "thread_lost_seconds_total")
    tell(metrics, STATS)
    assert [sample(metrics, f"step_{name}") for name in names] == [2, 1, 8.0, 2.5]
    tell(metrics, dataclasses.replace(STATS, team={}))
    assert [sample(metrics, f"step_{name}") for name in names] == [None] * 4


def test_prompts_with_several_answers() -> None:
    metrics = ServerMetrics("m")
    metrics.on_prompt(4)
    metrics.on_answered(9)
    metrics.on_rejected("max_waiting")
    assert sample(metrics, "request_params_n_sum") == 4
    assert sample(metrics, "request_max_num_generation_tokens_sum") == 9
    assert sample(metrics, "admission_rejections_total", reason="max_waiting") == 1


def test_the_instances_gauges_and_counters() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, STATS, restarts=3)
    metrics.instances.front_waiting = 10
    expected = {
        "instance_up": 1,
        "instance_restarts_total": 3,
        "num_requests_running": 5,
        "num_requests_waiting": 6,
        "kv_cache_usage_perc": 0.25,
        "large_pages": 7,
        "large_page_bytes": 4096,
        "empty_large_pages": 2,
        "steps_total": 40,
        "prefix_cache_queries_total": 90,
        "prefix_cache_hits_total": 30,
        "num_preemptions_total": 4,
        "prompt_tokens_cached_total": 30,
        "protected_prefixes": 2,
        "protected_tokens": 77,
        "spec_decode_num_drafts_total": 12,
        "spec_decode_num_draft_tokens_total": 44,
        "spec_decode_num_accepted_tokens_total": 33,
    }
    assert {name: sample(metrics, name) for name in expected} == expected
    assert sample(metrics, "num_requests_waiting", instance="front") == 10


def test_groups_and_rungs_have_labels() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, STATS)
    assert sample(metrics, "group_used_pages", group="full") == 1
    assert sample(metrics, "group_cached_pages", group="sliding(512)") == 6
    assert sample(metrics, "group_evicted_pages_total", group="full") == 4
    assert sample(metrics, "group_prefix_cache_hits_total", group="sliding(512)") == 32
    assert sample(metrics, "ladder_rungs_total", rung="own_page") == 8
    assert sample(metrics, "ladder_rungs_total", rung="preempt") == 4
    assert sample(metrics, "device_steps_total", how="prefill") == 2


def test_pages_by_state_and_sizes_of_groups() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, STATS, facts=InstanceFacts(3, 8, "m", 512, 28 * 1024))
    assert sample(metrics, "group_unwritten_pages", group="full") == 9
    assert sample(metrics, "group_stranded_pages", group="sliding(512)") == 2
    assert sample(metrics, "group_checkpoint_pages_total", group="full") == 0
    assert sample(metrics, "group_page_bytes", group="sliding(512)") == 2048
    sizes = {"page_tokens": "16", "page_bytes": "2048", "most_pages": "14"}
    assert sample(metrics, "group_info", group="sliding(512)", **sizes) == 1
    [info] = [f for f in metrics.registry.collect() if f.name == "kvell:cache_config_info"]
    assert info.samples[0].labels == {
        "model_name": "m",
        "instance": "mixed-0",
        "block_size": "16",
        "num_gpu_blocks": "28",
        "large_page_bytes": "4096",
        "large_pages": "7",
        "incarnation": "3",
        "max_model_len": "512",
        "kv_pool_bytes": "28672",
    }


def test_steps_by_size_draft_tokens_by_position_and_sources() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, STATS)
    assert sample(metrics, "iteration_tokens_total_bucket", le="1.0") == 30
    assert sample(metrics, "iteration_tokens_total_bucket", le="64.0") == 39
    assert sample(metrics, "iteration_tokens_total_bucket", le="16384.0") == 39
    assert sample(metrics, "iteration_tokens_total_bucket", le="+Inf") == 40
    assert sample(metrics, "iteration_tokens_total_count") == 40
    assert sample(metrics, "iteration_tokens_total_sum") == 321
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [sample(metrics, name, position=str(p)) for p in range(3)] == [20, 13, None]
    assert sample(metrics, "prompt_tokens_by_source_total", source="local_compute") == 60
    assert sample(metrics, "prompt_tokens_by_source_total", source="local_cache_hit") == 30
    assert sample(metrics, "prompt_tokens_cached_by_source_total", source="device") == 30


def test_prompts_that_missed_have_a_reason() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, STATS)
    reasons = ("never_seen", "evicted", "other_salt")
    told = [sample(metrics, "prefix_cache_misses_total", reason=one) for one in reasons]
    assert told == [6, 2, None]


def test_a_contract_is_told_whole_and_in_parts() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, STATS, facts=InstanceFacts(3, 8, "m", 512, 28 * 1024))
    assert sample(metrics, "memory_contract_bytes") is None, "it told of none"
    promised = {"weights_bytes": 30, "kv_pool_bytes": 60, "contract_bytes": 90}
    tell(metrics, None, facts=InstanceFacts(3, 8, "m", 512, 28 * 1024, memory=promised))
    assert sample(metrics, "memory_contract_bytes") == 90, "also while it does not answer"
    parts = [sample(metrics, "memory_contract_part_bytes", part=p) for p in ("weights", "kv_pool")]
    assert parts == [30, 60]
    assert sample(metrics, "memory_contract_part_bytes", part="contract") is None


def test_processes_tell_what_they_take() -> None:
    metrics = ServerMetrics("m")
    metrics.instances.front_bytes = 11
    metrics.instances.instances = {
        "mixed-0": InstanceFigures(STATS, process_bytes=70),
        "mixed-1": InstanceFigures(),
    }
    told = [
        sample(metrics, "process_memory_bytes", instance=name)
        for name in ("front", "mixed-0", "mixed-1")
    ]
    assert told == [11, 70, None]


def test_answers_over_http_are_counted_by_path_and_status() -> None:
    metrics = ServerMetrics("m")
    for path, status in (
        ("/v1/completions", 200),
        ("/v1/completions", 200),
        ("/v1/completions", 429),
        ("/v1/chosen/by/a/client", 404),
        ("/metrics", 200),
    ):
        metrics.answered_over_http(path, status)
    name = "http_responses_total"
    assert sample(metrics, name, path="/v1/completions", status="200") == 2
    assert sample(metrics, name, path="/v1/completions", status="429") == 1
    assert sample(metrics, name, path="other", status="404") == 1
    assert "chosen" not in metrics.render().decode()


def test_attempts_after_a_death_are_counted_when_the_request_ends() -> None:
    metrics = ServerMetrics("m")
    for attempt in (0, 1, 2):
        end = dataclasses.replace(
            ended("length"), finished=Finished(RequestId("r"), attempt, "stop")
        )
        metrics.on_ended(end)
    assert sample(metrics, "request_retries_total") == 3


def test_without_an_instance_only_what_is_known_is_said() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, None)
    assert sample(metrics, "instance_up") == 0
    assert sample(metrics, "num_requests_running") is None


def test_two_servers_in_one_process_share_nothing() -> None:
    one, other = ServerMetrics("m"), ServerMetrics("m")
    one.first_tokens(1.0, 1, 1)
    assert sample(other, "time_to_first_token_seconds_count") == 0


def test_the_text_format_carries_every_series_of_the_stats() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, dataclasses.replace(STATS, groups=(), rungs={}))
    text = metrics.render().decode()
    assert 'kvell:num_requests_running{instance="mixed-0",model_name="m"} 5.0' in text
    assert "# TYPE kvell:num_preemptions_total counter" in text


def test_a_cpu_buffer_says_what_went_out_and_came_in() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, STATS)
    assert sample(metrics, "cpu_buffer_requests") is None, "there is none"
    buffer = {"large_pages": 9, "used_large_pages": 4, "holders": 2, "out_bytes": 70, "in_bytes": 5}
    tell(metrics, dataclasses.replace(STATS, buffer=buffer))
    assert sample(metrics, "cpu_buffer_large_pages", state="used") == 4
    assert sample(metrics, "cpu_buffer_large_pages", state="empty") == 5
    assert sample(metrics, "cpu_buffer_requests") == 2
    assert sample(metrics, "cpu_buffer_bytes_total", way="out") == 70
    assert sample(metrics, "cpu_buffer_bytes_total", way="in") == 5
    assert sample(metrics, "cpu_buffer_parked") is None, "prompts do not go ahead there"
    more = dataclasses.replace(STATS, buffer=buffer | {"cached_pages": 3, "cache_hit_tokens": 40})
    tell(metrics, dataclasses.replace(more, prefix_cache_hits=100))
    assert sample(metrics, "cpu_buffer_cached_pages") == 3
    found = {"source": "cpu_buffer"}, {"source": "device"}
    hits = [sample(metrics, "prompt_tokens_cached_by_source_total", **one) for one in found]
    assert hits == [40, 60]
    ahead = {"parked": 1, "parkings": 8, "logical_large_pages": 6}
    tell(metrics, dataclasses.replace(STATS, buffer=buffer | ahead))
    assert sample(metrics, "cpu_buffer_parked") == 1
    assert sample(metrics, "cpu_buffer_logical") == 6


def test_transfers_between_instances_are_counted_by_kind() -> None:
    metrics = ServerMetrics("m")
    metrics.instances.instances = {
        "mixed-0": InstanceFigures(transfers={"move": TransferTotals(3, 700)})
    }
    names = ("request_transfers_total", "request_transfer_bytes_total")
    for kind, expected in {"handover": [0, 0], "move": [3, 700], "pull": [0, 0]}.items():
        assert [sample(metrics, name, kind=kind) for name in names] == expected


def test_loans_are_counted_and_stay_counted_when_they_have_ended() -> None:
    metrics = ServerMetrics("m")
    sections = {"lent": 0, "borrowed": 0, "loans": 4, "loaned_bytes": 900}
    tell(metrics, dataclasses.replace(STATS, sections=sections))
    assert sample(metrics, "kv_sections", side="borrowed") == 0
    assert sample(metrics, "kv_section_loans_total") == 4
    assert sample(metrics, "kv_section_loan_bytes_total") == 900


def test_a_shared_pool_says_who_has_its_chunks() -> None:
    metrics = ServerMetrics("m")
    tell(metrics, STATS)
    assert sample(metrics, "memory_chunks", state="kv") == 21
    assert sample(metrics, "memory_chunks", state="cold") == 0
    assert sample(metrics, "memory_chunk_bytes") == 64
    assert sample(metrics, "memory_chunk_moves_total", move="inflated") == 13
    assert sample(metrics, "memory_chunk_moves_total", move="chunk_bytes") is None


def test_every_instance_has_its_own_series_of_one_family() -> None:
    metrics = ServerMetrics("m")
    beside = dataclasses.replace(STATS, running=9)
    metrics.instances.instances = {
        "mixed-0": InstanceFigures(STATS),
        "mixed-1": InstanceFigures(beside, restarts=2),
        "mixed-2": InstanceFigures(),
    }
    running = [sample(metrics, "num_requests_running", instance=f"mixed-{n}") for n in range(3)]
    assert running == [5, 9, None]
    assert [sample(metrics, "instance_up", instance=f"mixed-{n}") for n in range(3)] == [1, 1, 0]
    assert sample(metrics, "instance_restarts_total", instance="mixed-1") == 2
    text = metrics.render().decode()
    assert text.count("# TYPE kvell:num_requests_running gauge") == 1
    assert text.count("# TYPE kvell:iteration_tokens_total histogram") == 1
