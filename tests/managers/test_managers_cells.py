"""The suites, the memory of their cases, and the driver over them."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.managers import __main__ as driver
from bench.managers.cells import (
    DIVISIONS,
    MATRIX_TRACES,
    POLICIES,
    SHAPES,
    SUITES,
    VLLM,
    Case,
    Suite,
    kinds,
    memory_bytes,
    memory_flag,
)
from bench.managers.theirs import PEER_SHAPES
from bench.managers.verdicts import Comparison, verdicts
from bench.replay.command import replayed
from bench.replay.shapes import read_shape
from kvell.memory import longest_request, plan_layout
from tests.simulator.replays import row


class TestSuites:
    def test_the_matrix_has_every_shape_trace_and_size(self) -> None:
        ours = [cell for cell in SUITES["matrix"].cells() if cell[1] in POLICIES]
        assert len(ours) == len(SHAPES) * len(MATRIX_TRACES) * 3 * len(DIVISIONS) == 1500

    def test_vllm_replays_the_peers_shapes_alone(self) -> None:
        theirs = [case for case, policy in SUITES["matrix"].cells() if policy in VLLM]
        assert len(theirs) == len(PEER_SHAPES) * len(MATRIX_TRACES) * 3 * 2
        assert {case.shape for case in theirs} == set(PEER_SHAPES)

    def test_policies_of_a_case_follow_one_another(self) -> None:
        for suite in SUITES.values():
            cases = [case for case, _ in suite.cells()]
            pairs = zip([None, *cases], cases, strict=False)
            assert len(set(cases)) == sum(before != after for before, after in pairs)

    @pytest.mark.parametrize("name", SUITES)
    def test_names_tell_cases_apart(self, name: str) -> None:
        cases = SUITES[name].cases
        assert len({case.name for case in cases}) == len(cases)


class TestMemory:
    def test_mean_requests_in_whole_pages_of_paged(self) -> None:
        page_bytes = 24 * 2 * 8 * 64 * 2 * 16
        rows = [row(16, 1), row(31, 1), row(32, 1)]  # 2, 2 and 3 pages
        assert memory_bytes(read_shape("gpt-oss-20b"), rows, 6) == 14 * page_bytes

    def test_room_for_the_longest_at_least(self) -> None:
        shape = read_shape("gemma3-27b")
        rows = [row(10, 1) for _ in range(99)] + [row(5000, 1)]
        layout = plan_layout(
            shape.description.layers, memory_bytes(shape, rows, 8), manager="paged"
        )
        assert longest_request(layout, 1 << 20, 64) >= 5001

    def test_a_size_in_mean_requests_or_as_it_is(self, tmp_path: Path) -> None:
        case = Case("gpt-oss-20b", "chat", 5, "24GiB")
        assert memory_flag(case, tmp_path) == "24GiB"
        flag = memory_flag(Case("gpt-oss-20b", "chat", 5, "8x"), tmp_path)
        assert flag.endswith("B") and int(flag[:-1]) > 1 << 20

    def test_which_shapes_are_full_attention_only(self) -> None:
        plain = [name for name in SHAPES if kinds(read_shape(name)) == ["full"]]
        images = ["llava-onevision-7b", "qwen2.5-vl-7b"]
        assert plain == ["deepseek-v2-lite", "llama3-8b", *images, "qwen3-8b"]


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_runs_under_every_division(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "CACHE", tmp_path)
    runner, case = driver.Runner(tmp_path, None, None), Case(name, "chat", 4, "8x")
    outcomes = {policy: runner.outcome(case, policy) or {} for policy in DIVISIONS}
    ran, steps, _, _, same = verdicts([Comparison(name, kinds(read_shape(name)), outcomes)])
    assert not (ran.missed or steps.missed or same.missed)
    assert outcomes["kvell"]["requests_finished"] == 4


def test_memory_that_holds_no_request_is_a_refusal() -> None:
    report = replayed("--trace", "chat", "--limit", 1, "--model", "llama3-8b", "--kv-memory", "9B")
    assert "--kv-memory" in report["refused"]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A driver of one small suite, and the policies that were replayed."""
    asked: list[str] = []

    def counted(*words: Any) -> dict[str, Any]:
        asked.append(" ".join(map(str, words)))
        return replayed(*words)

    case = Case("gpt-oss-20b", "chat", 6, "full", 1)
    monkeypatch.setitem(SUITES, "hits", Suite((case,), ("kvell", "paged")))
    monkeypatch.setattr(driver, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(driver, "replayed", counted)
    return asked


def test_cells_are_replayed_once_and_written(
    suite: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        driver.main(["hits", "--traces", str(tmp_path), "--json", str(tmp_path / "hits.json")])
        assert len(suite) == 3, "the ample run, and one of each policy in the full pool"
    written = json.loads((tmp_path / "hits.json").read_text())
    (outcomes,) = written["cells"].values()
    assert list(outcomes) == ["kvell", "paged"]
    assert outcomes["kvell"]["requests_finished"] == 6
    assert 0 < outcomes["kvell"]["hit_rate"] <= max(written["endless_hit_rates"].values())
    assert "gpt-oss-20b" in capsys.readouterr().out


def test_vllm_is_left_out_without_its_environment(suite: list[str], tmp_path: Path) -> None:
    runner = driver.Runner(tmp_path, 2, None)
    assert runner.outcome(SUITES["hits"].cases[0], "vllm") is None
    assert suite == []


def test_a_changed_source_is_another_fingerprint(tmp_path: Path) -> None:
    source = tmp_path / "src" / "kvell" / "x.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    before = driver.fingerprint(tmp_path)
    assert driver.fingerprint(tmp_path) == before
    source.write_text("2")
    assert driver.fingerprint(tmp_path) != before
