"""Side by side: turns, ratios, limits, and paused processes."""

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench.machine import Roofline, best_of, middle_of
from bench.side_by_side import report
from bench.side_by_side.__main__ import arguments, starters
from bench.side_by_side.cases import CASES, Case, cases_of, reason_of, vllm_source
from bench.side_by_side.model_size import ModelSize, model_size
from bench.side_by_side.processes import SystemFailed, SystemProcess, birth, descendants
from bench.side_by_side.rounds import alternated, joined, order_of
from bench.side_by_side.scenarios import Figures, Scenario, batches, prefill, served
from bench.side_by_side.systems import python_of
from bench.side_by_side.vllm_environment import vllm_python
from kvell.errors import ChangeSomething

SIZE = ModelSize(weight_bytes=1000, prefill_parameters=50, kv_token_bytes=10)
ROOFLINE = Roofline(read_bytes_per_second=1e6, gemm_flops_per_second=1e6)


def figures(output: float, **more: float) -> Figures:
    return {"output_tokens_per_second": output, **more}


class TestScenarios:
    def test_batches_come_at_once_and_are_alike(self) -> None:
        [one, eight] = batches([1, 8], 128, 16)
        assert (one.name, len(one.rows(0)), len(eight.rows(0))) == ("batch 1", 1, 8)
        assert {(row.arrival_s, row.num_tokens) for row in eight.rows(3)} == {(0.0, 144)}
        assert one.figure == "output_tokens_per_second"

    def test_a_prefill_is_compared_by_prompt_tokens(self) -> None:
        assert prefill(2048).figure == "prompt_tokens_per_second"
        assert prefill(2048).rows(0)[0].prompt_tokens == 2048

    def test_a_workload_comes_at_its_rate(self) -> None:
        scenario = served("sharegpt-like", 4.0, 200)
        rows = scenario.rows(1)
        assert not scenario.is_rectangular
        assert len(rows) / rows[-1].arrival_s == pytest.approx(4.0, rel=0.3)
        assert [r.arrival_s for r in rows] != [r.arrival_s for r in scenario.rows(2)]


class TestReport:
    def test_ratios_are_of_the_same_round(self) -> None:
        ours = [figures(10), figures(20), figures(30)]
        theirs = [figures(5), figures(4), figures(15)]
        assert report.ratio(ours, theirs, "output_tokens_per_second") == 2.0

    def test_what_starts_differ_by_is_how_far_their_ratio_is_known(self) -> None:
        ours = [figures(value) for value in (10, 10, 90, 11, 11, 11, 12, 12, 12)]
        theirs = [figures(10)] * 9
        error = report.ratio_error(ours, theirs, "output_tokens_per_second", 3)
        assert error == pytest.approx(2 * 0.1 / math.sqrt(3))
        assert report.ratio_error(ours, theirs, "output_tokens_per_second", 1) is None
        [scenario] = batches([8], 128, 128)
        found = report.summary(scenario, {"a": ours, "b": theirs}, None, starts=3)
        assert report.table_rows(found)[1][3] == "1.100× ±0.115"

    def test_spread_is_of_all_rounds(self) -> None:
        assert report.spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)

    def test_medians_are_of_figures_that_all_rounds_have(self) -> None:
        rounds = [figures(1, tpot_p50_seconds=3), figures(2), figures(9, tpot_p50_seconds=5)]
        assert report.medians(rounds) == {"output_tokens_per_second": 2}
        assert report.medians(rounds[::2])["tpot_p50_seconds"] == 4

    def test_a_summary_compares_all_with_the_first(self) -> None:
        [scenario] = batches([8], 128, 128)
        rounds = {"kvell": [figures(50), figures(60)], "other": [figures(25), figures(20)]}
        found = report.summary(scenario, rounds, limit=100.0)
        assert found["systems"]["kvell"]["ratio"] == 1.0
        assert found["systems"]["other"]["ratio"] == 2.5
        assert found["systems"]["kvell"]["share_of_limit"] == 0.55
        assert json.loads(json.dumps(found)) == found
        assert report.table_rows(found)[1] == (
            *("other", "22.5", "22%", "2.50×", "22%"),
            *("–", "–", "–"),
        )

    def test_a_prompts_time_is_no_part_of_decoding(self) -> None:
        [scenario] = batches([8], 128, 128)
        rounds = {"kvell": [figures(50, tpot_p50_seconds=s) for s in (0.1, 0.125, 0.2)]}
        found = report.summary(scenario, rounds, limit=100.0)["systems"]["kvell"]
        assert found["share_of_limit"] == 0.5
        assert found["decode_share_of_limit"] == 8 / 0.125 / 100

    def test_limits_of_decode_prefill_and_a_mix(self) -> None:
        [decode] = batches([4], 100, 20)
        assert report.limit_of(decode, SIZE, ROOFLINE) == 4 * 1e6 / (1000 + 4 * 110 * 10)
        assert report.limit_of(prefill(64), SIZE, ROOFLINE) == 1e6 / (2 * 50)
        assert report.limit_of(served("sharegpt-like", 1, 4), SIZE, ROOFLINE) is None

    def test_a_limit_is_the_best_that_was_seen(self) -> None:
        assert best_of([Roofline(3, 5), Roofline(4, 2)]) == Roofline(4, 5)

    def test_beside_it_stands_what_was_usual(self) -> None:
        moments = [Roofline(3, 5), Roofline(9, 2), Roofline(4, 6)]
        assert middle_of(moments) == Roofline(4, 5)


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    tensors = {"model.embed_tokens.weight": (10, 32), "a.weight": (32, 32), "norm": (32,)}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    found = model_size(tmp_path)
    assert found.weight_bytes == 2 * (320 + 1024 + 32)
    assert found.prefill_parameters == 1024 + 32
    assert found.kv_token_bytes == 2 * 3 * 2 * 8 * 2


def test_an_embedding_beside_the_output_matrix_is_not_read_whole(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (10, 32), "lm_head.weight": (10, 32), "a": (32, 32)}
    save_file({n: np.zeros(s, np.float32) for n, s in shapes.items()}, tmp_path / "m.safetensors")
    assert model_size(tmp_path).weight_bytes == 2 * (320 + 1024)
    four_bits = model_size(tmp_path, four_bits=True)
    assert four_bits.weight_bytes == 1024 * 20 / 32 + 320 * 34 / 32
    assert four_bits.prefill_parameters == 1024


class TestCases:
    def test_names_that_are_no_cases_are_models(self) -> None:
        [four, other] = cases_of(["smollm2-int4", "some/dir"])
        assert four is CASES["smollm2-int4"]
        assert other == Case("some/dir", "some/dir")

    def test_only_blocks_need_a_tokenizer_from_elsewhere(self, tmp_path: Path) -> None:
        plain, flags = vllm_source(CASES["falcon-h1-small"], tmp_path)
        assert (plain, flags) == (str(tmp_path), ("--no-enable-prefix-caching",))
        blocks, flags = vllm_source(CASES["smollm2-int4"], tmp_path)
        assert blocks.endswith(".gguf")
        assert flags[flags.index("--tokenizer") + 1] == str(tmp_path)

    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            ("ended\nINFO a\nValueError: no 4 bits on CPU\n  at line 3", "no 4 bits on CPU"),
            ("ended\n(APIServer) pydantic.ValidationError: 1: bad\nInfo", "1: bad"),
            ("ended with status 3\nno memory", "no memory"),
            ("OSError: '/a/b-1/c/m.gguf' is not a JSON file.", "'m.gguf' is not a JSON file."),
            ("", "it said nothing"),
        ],
    )
    def test_a_reason_is_the_line_that_complains(self, words: str, reason: str) -> None:
        assert reason_of(words) == reason

    def test_flags_of_a_case_go_to_every_kvell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[list[str]] = []
        monkeypatch.setattr(
            "bench.side_by_side.__main__.kvell_server",
            lambda model, log, flags: started.append([model, *flags]),
        )
        options = arguments(["--systems", "kvell", "--kvell", "jenga=--manager jenga"])
        found = starters(options, CASES["smollm2-int4"], Path("m"), Path("logs"))
        for start in found.values():
            start()
        assert [one[0] for one in started] == ["m", "m"]
        assert all("int4" in one for one in started)
        assert "jenga" in started[1] and "jenga" not in started[0]

    def test_another_tree_is_started_by_its_own_interpreter(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        started: list[tuple[str, list[str]]] = []
        monkeypatch.setattr(
            "bench.side_by_side.__main__.kvell_server",
            lambda model, log, flags, python=sys.executable: started.append((python, flags[2:])),
        )
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        options = arguments(["--systems", "kvell", "--tree", f"before={tmp_path} --memory 1GiB"])
        found = starters(options, CASES["smollm2-int4"], Path("m"), Path("logs"))
        for start in found.values():
            start()
        assert list(found) == ["kvell", "before"]
        own = CASES["smollm2-int4"].kvell
        flags = [*own, "--memory", "1GiB"]
        assert started == [(sys.executable, [*own]), (str(python), flags)]

    def test_a_tree_without_an_environment_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            ChangeSomething, match=r"no \.venv/bin/python; run `make install` there"
        ):
            python_of(str(tmp_path))


class StoppedProcess:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def pause(self) -> None:
        self._log.append(f"pause {self._name}")

    def resume(self) -> None:
        self._log.append(f"resume {self._name}")


class FakeSystem:
    def __init__(self, log: list[str], name: str, *, refuses: str = "") -> None:
        self.process = StoppedProcess(log, name)
        self._log, self._name, self._refuses = log, name, refuses

    def run(self, scenario: Scenario, seed: int) -> Figures | None:
        self._log.append(f"{self._name} {scenario.name} {seed}")
        return None if scenario.name == self._refuses else figures(seed)


class TestRounds:
    def test_whoever_was_first_comes_last_next(self) -> None:
        assert [order_of(n, ["a", "b", "c"])[0] for n in range(4)] == ["a", "b", "c", "a"]
        assert order_of(1, ["a", "b", "c"]) == ["b", "c", "a"]

    def test_all_are_asked_the_same_and_only_one_runs(self) -> None:
        log: list[str] = []
        systems = {name: FakeSystem(log, name) for name in "ab"}
        results = alternated(systems, batches([1], 4, 4), 2, between=lambda: log.append("-"))  # type: ignore[arg-type]
        assert log == [
            *("pause a", "pause b", "-"),
            *("resume a", "a batch 1 1000", "pause a", "resume b", "b batch 1 1000", "pause b"),
            "-",
            *("resume b", "b batch 1 1001", "pause b", "resume a", "a batch 1 1001", "pause a"),
        ]
        assert results["batch 1"]["a"] == results["batch 1"]["b"]
        assert list(results["batch 1"]) == ["a", "b"]

    def test_who_cannot_do_a_scenario_is_left_out_of_it(self) -> None:
        log: list[str] = []
        systems = {"a": FakeSystem(log, "a"), "b": FakeSystem(log, "b", refuses="batch 8")}
        results = alternated(systems, batches([1, 8], 4, 4), 1)  # type: ignore[arg-type]
        assert list(results["batch 1"]) == ["a", "b"]
        assert list(results["batch 8"]) == ["a"]

    def test_starts_have_rounds_of_their_own(self) -> None:
        scenarios = batches([1], 4, 4)
        parts = []
        for first in (0, 2):
            systems = {name: FakeSystem([], name) for name in "ab"}
            parts.append(alternated(systems, scenarios, 2, first=first))  # type: ignore[arg-type]
        found = joined(parts)["batch 1"]
        seeds = [one["output_tokens_per_second"] for one in found["a"]]
        assert seeds == [1000, 1001, 1002, 1003]
        assert list(found) == ["a", "b"] and found["a"] == found["b"]
        assert len(parts[0]["batch 1"]["a"]) == 2


PARENT = (
    "import subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    " start_new_session=True)\n"
    "print(p.pid, flush=True)\n"
    "time.sleep(60)"
)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def settled(pid: int, wanted: str) -> bool:
    """Signals take a moment to arrive."""
    deadline = time.monotonic() + 30
    while state_of(pid) not in wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(pid) in wanted


class TestProcesses:
    def test_a_paused_process_stands_still_with_its_children(self, tmp_path: Path) -> None:
        process = SystemProcess([sys.executable, "-c", PARENT], tmp_path / "log", {}, talks=True)
        child = int(process.hear())
        assert list(descendants(process.process.pid)) == [child]
        process.pause()
        assert settled(child, "T")
        assert settled(process.process.pid, "T")
        process.resume()
        assert settled(child, "SR")
        process.end()
        deadline = time.monotonic() + 30
        while birth(child) is not None and state_of(child) != "Z" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert birth(child) is None or state_of(child) == "Z"

    def test_who_ends_is_said_with_its_last_words(self, tmp_path: Path) -> None:
        script = "import sys; print('no memory', file=sys.stderr); sys.exit(3)"
        process = SystemProcess([sys.executable, "-c", script], tmp_path / "log", {})
        with pytest.raises(SystemFailed, match=r"ended with status 3\nno memory"):
            process.wait_for("http://127.0.0.1:9/", within_seconds=60)
        process.end()

    def test_who_says_nothing_more_has_ended(self, tmp_path: Path) -> None:
        process = SystemProcess(
            [sys.executable, "-c", "print(1)"], tmp_path / "log", {}, talks=True
        )
        assert process.hear() == "1\n"
        with pytest.raises(SystemFailed, match="ended"):
            process.hear()
        process.end()


def test_a_directory_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ChangeSomething, match=r"--vllm-env=.*is no environment; name a directory"):
        vllm_python(tmp_path)
    assert (tmp_path / "mine").read_text() == "keep"


def test_an_environment_without_vllm_is_not_filled_up(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with pytest.raises(ChangeSomething, match=r"--vllm-env=.*holds no vLLM; run python -m bench"):
        vllm_python(tmp_path)


def test_all_at_once_has_no_rate() -> None:
    assert batches([2], 4, 4)[0].rate == math.inf
