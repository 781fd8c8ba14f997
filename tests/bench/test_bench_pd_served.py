"""Shorter sessions stay sessions, systems are paired by number, and ratios are of one round."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.pd import served
from bench.pd.served import (
    CACHINGS,
    WORKLOADS,
    Run,
    System,
    comparisons,
    main,
    row_of,
    rows_of,
    shortened,
    systems_of,
)
from kvell.cluster.instances import check_start, chosen_pd_caching, parse_instances
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import ideal_hit_rate, predecessors


def run_of(seconds: float, cached: float = 0.5, failed: int = 0) -> Run:
    spread = {"mean": seconds, "p99": 2 * seconds}
    latencies = dict.fromkeys(("e2e_seconds", "ttft_seconds", "tpot_seconds"), spread)
    return {**latencies, "cached_share": cached, "failed": failed}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("divisor", [1, 8])
def test_shorter_sessions_are_sessions(workload: str, divisor: int) -> None:
    rows = generate_trace(workload, 60)
    short = shortened(rows, divisor)
    befores = predecessors(short)
    assert befores == predecessors(rows)
    for old, new, before in zip(rows, short, befores, strict=True):
        assert (old.session, old.continues) == (new.session, new.continues)
        assert new.output_tokens >= 2
        assert len(new.block_ids) * new.block_tokens <= new.prompt_tokens
        if before is not None and new.continues:
            assert new.prompt_tokens > short[before].num_tokens
    if divisor == 1:
        assert [one.prompt_tokens for one in rows] == [one.prompt_tokens for one in short]
    else:
        assert sum(r.num_tokens for r in short) < sum(r.num_tokens for r in rows) / (divisor - 2)


def test_shared_prefixes_stay_shared() -> None:
    short = shortened(generate_trace("loogle-like", 40), 8)
    assert ideal_hit_rate(short) > 0.5


def test_every_system_has_as_many_requests_per_instance() -> None:
    two, three = (rows_of("react-like", 200, 8, 2.0, count, seed=1) for count in (2, 3))
    assert [one.prompt_tokens for one in two] == [one.prompt_tokens for one in three]
    assert two[-1].arrival_s / three[-1].arrival_s == pytest.approx(1.5)
    assert len(two) / two[-1].arrival_s == pytest.approx(4.0, rel=0.2)


@pytest.mark.parametrize("counts", [[2], [3], [2, 3]])
def test_systems_can_be_started(counts: list[int]) -> None:
    systems = systems_of(counts, CACHINGS)
    assert len(systems) == sum({2: 3, 3: 5}[count] for count in counts)
    for system in systems:
        parsed = parse_instances(system.instances)
        check_start(parsed)
        if system.caching is not None:
            chosen_pd_caching(parsed, system.caching, "--pd-caching")
            assert f"--pd-caching={system.caching}" in system.flags()
        assert system.count in counts


def test_ratios_are_of_the_same_round_and_of_as_many_instances() -> None:
    colocated, split = System("mixed=2"), System("prefill=1,decode=1", 0)
    others = System("mixed=3"), System("prefill=2,decode=1", 3)
    runs = {
        colocated: [run_of(1.0), run_of(4.0), run_of(2.0)],
        split: [run_of(0.5), run_of(4.0), run_of(4.0)],
        others[0]: [run_of(1.0)],
        others[1]: [run_of(3.0)],
    }
    found = comparisons(runs)
    assert list(found) == [
        "prefill=1,decode=1 caching 0 / mixed=2",
        "prefill=2,decode=1 caching 3 / mixed=3",
    ]
    assert found["prefill=1,decode=1 caching 0 / mixed=2"]["jct_p99"] == [1.0, 0.5, 2.0]
    assert found["prefill=2,decode=1 caching 3 / mixed=3"]["tpot_mean"] == [3.0, 3.0, 3.0]


def test_a_row_has_medians_and_the_range() -> None:
    row = row_of(System("mixed=2"), [run_of(1.0), run_of(5.0, 0.9), run_of(3.0, failed=2)])
    assert row["jct_mean_seconds"] == 3.0 and row["ttft_p99_seconds"] == 6.0
    assert row["jct_mean_range_seconds"] == [1.0, 5.0]
    assert (row["hits"], row["failed"]) == (0.5, 2)


def test_rounds_alternate_and_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round asks every system the same, forwards and backwards in turn."""
    asked: list[tuple[str, int, int]] = []

    def measured(system: System, _flags: Any, rows: Any, seed: int, _folder: Path) -> Run:
        asked.append((system.name, seed, sum(one.prompt_tokens for one in rows)))
        return run_of(1.0 + seed)

    monkeypatch.setattr(served, "measured", measured)
    path = tmp_path / "pd_served.json"
    main(["--rounds", "2", "--requests", "10", "--caching", "3", "--json", str(path)])
    assert [name for name, _, _ in asked] == [
        "mixed=2",
        "prefill=1,decode=1 caching 3",
        "prefill=1,decode=1 caching 3",
        "mixed=2",
    ]
    assert len({tokens for _, seed, tokens in asked if seed == 0}) == 1
    told = json.loads(path.read_text())
    assert told["setting"]["rounds"] == 2
    assert [row["jct_mean_seconds"] for row in told["rows"]] == [1.5, 1.5]
    assert told["ratios"]["prefill=1,decode=1 caching 3 / mixed=2"]["jct_mean"] == [1.0, 1.0, 1.0]
