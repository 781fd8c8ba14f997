"""``kvell bench offline`` and ``kvell bench workloads``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.cli.bench.offline import throughput
from kvell.simulator.traces.generators import GENERATORS
from tests.cli.conftest import FakeModel

Kvell = Callable[..., Any]
STATS = {
    "generation_seconds": 4.0,
    "max_running": 3,
    "requests": 8,
    "prompt_tokens": 200,
    "output_tokens": 40,
    "cached_tokens": 50,
    "preemptions": 1,
}


class TestThroughput:
    def test_rates(self) -> None:
        assert throughput(STATS) == {
            "requests": 8,
            "duration_seconds": 4.0,
            "request_rate": 2.0,
            "input_tokens_per_second": 50.0,
            "output_tokens_per_second": 10.0,
            "prompt_tokens": 200,
            "output_tokens": 40,
            "peak_running": 3,
            "hit_rate": 0.25,
            "preemptions": 1,
        }

    def test_no_time_at_all(self) -> None:
        assert throughput(STATS | {"generation_seconds": 0.0})["request_rate"] == 0.0


@pytest.fixture
def counting(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    monkeypatch.setattr(model, "stats", lambda: STATS)
    return model


class TestOffline:
    def test_json(self, kvell: Kvell, counting: FakeModel) -> None:
        args = ("--workload", "loogle-like", "--num-requests", "6", "--model", "any", "--json")
        ended = kvell("bench", "offline", *args)
        assert ended.code == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert (found["model"], found["workload"], found["seed"]) == ("any", "loogle-like", 0)
        assert found["output_tokens_per_second"] == 10.0
        assert len(counting.asked) == 6
        assert counting.sequential is False

    def test_what_the_model_is_asked(self, kvell: Kvell, counting: FakeModel) -> None:
        lengths = ("--prompt-tokens", "30", "--output-tokens", "7", "--num-requests", "3")
        ended = kvell("bench", "offline", *lengths, "--vocab-size", "400")
        assert ended.code == 0, ended.stderr
        for text, sampling in counting.asked:
            assert len(text) == 30
            assert max(ord(char) for char in text) < 400
            assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (7, True, 0)
        assert len({text for text, _ in counting.asked}) == 3

    def test_the_seed_decides(self, kvell: Kvell, counting: FakeModel) -> None:
        for seed in ("1", "1", "2"):
            kvell("bench", "offline", "--prompt-tokens", "9", "--num-requests", "1", "--seed", seed)
        first, again, other = (text for text, _ in counting.asked)
        assert first == again != other

    def test_a_table_and_a_file(self, kvell: Kvell, counting: FakeModel, tmp_path: Path) -> None:
        path = tmp_path / "o.json"
        ended = kvell("bench", "offline", "--prompt-tokens", "9", "--json", path)
        assert json.loads(path.read_text())["peak_running"] == 3
        words = " ".join(ended.stdout.split())
        assert "smollm2, 9 in, 128 out" in words
        assert "requests/s 2.00" in words
        assert "prompt tokens from the cache 25.0%" in words


class TestSources:
    def test_a_trace(self, kvell: Kvell, counting: FakeModel, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        line = {"arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 2}
        path.write_text((json.dumps(line) + "\n") * 4)
        ended = kvell("bench", "offline", "--trace", path, "--limit", "3", "--json")
        assert ended.code == 0, ended.stderr
        assert json.loads(ended.stdout)["workload"] == "t.jsonl"
        assert len(counting.asked) == 3

    @pytest.mark.parametrize(
        ("flags", "line"),
        [
            ((), "Give one of --workload, --trace, or --prompt-tokens"),
            (("--workload", "tree", "--prompt-tokens", "5"), "Give one of --workload"),
            (("--workload", "nope"), "--workload=nope: is none; use chat, "),
            (("--workload", "mmmu-pro"), "--workload=mmmu-pro: has images"),
            (("--trace", "/nope"), "--trace=/nope: cannot be read"),
            (("--prompt-tokens", "x"), "--prompt-tokens=x: is neither a length"),
            (("--output-tokens", "9:3"), "--output-tokens=9:3: allows no token"),
            (("--workload", "tree", "--json", "/nope/x"), "--json=/nope/x: is in no directory"),
        ],
    )
    def test_errors(self, kvell: Kvell, model: FakeModel, flags: Any, line: str) -> None:
        ended = kvell("bench", "offline", *flags)
        assert (ended.code, ended.stdout) == (2, "")
        assert line in ended.stderr
        assert model.asked == []


class TestWorkloads:
    def test_all_of_them(self, kvell: Kvell) -> None:
        ended = kvell("bench", "workloads", "--num-requests", "20", "--json")
        assert ended.code == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert [one["workload"] for one in found] == list(GENERATORS)
        assert {one["statistics"]["requests"] for one in found} == {20}
        published = {one["workload"] for one in found if one["published"]}
        assert {"sharegpt-like", "128k-8k", "infinite-8"} <= published
        assert "tree" not in published

    def test_beside_the_paper(self, kvell: Kvell) -> None:
        lines = kvell("bench", "workloads", "infinite-3").stdout.splitlines()
        ours, printed = (next(one for one in lines if key in one) for key in ("infinite-3", "publ"))
        assert ours.split()[-3:] == ["56,362", "28,788", "166,504"]
        assert printed.split()[-3:] == ["56,362", "28,788", "200,000"]
        assert any("Infinite-LLM, table 1: trace 3" in one for one in lines)

    def test_an_unknown_one(self, kvell: Kvell) -> None:
        ended = kvell("bench", "workloads", "nope")
        assert ended.code == 2
        assert "NAME=nope: is not a workload; use chat, " in ended.stderr
