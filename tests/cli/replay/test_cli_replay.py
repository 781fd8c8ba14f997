"""``kvell replay``: traces in, figures out, no model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.cli.replay.command import images_in_text
from kvell.cli.terminal.files import REPOSITORY, named_config
from kvell.memory import GroupKind, LayerSpec

Kvell = Callable[..., Any]
KINDS = (GroupKind.FULL, GroupKind.CROSS)

CONTRACT = {
    *("requests_finished", "requests_refused", "steps", "batch_mean", "hit_rate", "waste"),
    *("stranded", "manager_us_per_step", "manager_us_per_request_step", "preemptions"),
    *("kv_memory_bytes", "wall_seconds", "batch_saturated_mean", "waste_saturated"),
    "stranded_saturated",
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    shared = {"block_hashes": [5, 6], "block_tokens": 64}
    lines = [
        {"arrival_s": 0.0, "prompt_tokens": 200, "output_tokens": 4} | shared,
        {"arrival_s": 1.0, "prompt_tokens": 200, "output_tokens": 3} | shared,
        {"arrival_s": 900.0, "prompt_tokens": 9_000, "output_tokens": 3},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def replay(kvell: Kvell, tiny_config: Path, trace: Path) -> Callable[..., Any]:
    def call(*flags: str | Path) -> Any:
        args = ("--trace", trace, "--model", tiny_config, "--kv-memory", "16MiB", *flags)
        ended = kvell("replay", "--json", *args)
        assert ended.code == 0, ended.stderr
        return json.loads(ended.stdout)

    return call


class TestJson:
    def test_names_of_the_contract(self, replay: Any) -> None:
        found = replay()
        assert found.keys() >= CONTRACT
        assert [group["name"] for group in found["groups"]] == ["sliding(128)", "full"]

    def test_who_goes_first_can_be_learned(self, replay: Any) -> None:
        learned, plain = replay("--eviction", "hazard"), replay()
        assert learned["hit_rate"] == plain["hit_rate"], "nothing had to go"

    def test_clients_may_say_whether_they_return(self, replay: Any) -> None:
        told = replay("--eviction", "hazard", "--hints", "0.1")
        assert told["hit_rate"] == replay()["hit_rate"], "nothing had to go"

    def test_figures(self, replay: Any) -> None:
        found = replay()
        assert (found["requests_finished"], found["requests_refused"]) == (2, 1)
        assert found["hit_rate"] == 128 / 400
        assert 15 << 20 < found["kv_memory_bytes"] <= 16 << 20

    def test_limit_and_repeat(self, replay: Any) -> None:
        found = replay("--limit", "1", "--repeat", "3")
        assert found["requests_finished"] == 3
        assert found["hit_rate"] == 2 * 128 / 600

    def test_arrivals(self, replay: Any) -> None:
        assert replay("--limit", "2")["virtual_seconds"] < 0.5
        assert 1.0 < replay("--limit", "2", "--arrivals", "trace")["virtual_seconds"] < 1.5

    def test_hardware_sets_the_pace(self, replay: Any) -> None:
        slow, fast = (replay("--hardware", name)["virtual_seconds"] for name in ("l4", "h100"))
        assert slow > fast

    def test_what_clients_would_see(self, replay: Any) -> None:
        """The figures of ``kvell bench serve``, in virtual time."""
        found = replay("--arrivals", "trace", "--slo-ttft", "10", "--slo-tpot", "1e-9")
        assert (found["completed"], found["failed"]) == (2, 1)
        assert found["failures"] == {"refused": 1}
        for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
            assert list(found[name]) == ["mean", "p50", "p90", "p99"]
            assert 0 < found[name]["p50"] <= found[name]["p99"]
        assert found["e2e_seconds"]["mean"] > found["ttft_seconds"]["mean"]
        assert found["goodput"] == 0 < found["request_rate"]
        assert replay("--slo-ttft", "10")["goodput"] > 0

    def test_a_rate_makes_the_load_of_bench_serve(self, replay: Any) -> None:
        slow, fast = (replay("--limit", "2", "--rate", r)["virtual_seconds"] for r in ("0.1", "9"))
        assert slow > 20 * fast

    def test_smaller_steps(self, replay: Any) -> None:
        assert replay("--max-num-batched-tokens", "64")["steps"] > replay()["steps"]
        assert replay("--max-num-seqs", "1")["batch_mean"] == 1.0

    def test_without_chunks_prompts_are_whole_and_longer_ones_than_a_step_are_refused(
        self, replay: Any
    ) -> None:
        for tokens, expected in (("256", (2, 1)), ("150", (0, 3))):
            few = ("--max-num-batched-tokens", tokens)
            chunked, whole = replay(*few), replay(*few, "--no-enable-chunked-prefill")
            assert (chunked["requests_finished"], chunked["requests_refused"]) == (2, 1)
            assert (whole["requests_finished"], whole["requests_refused"]) == expected

    def test_managers_differ(self, replay: Any) -> None:
        ours, paged = replay(), replay("--manager", "paged")
        assert paged["requests_finished"] == ours["requests_finished"]
        assert len(paged["groups"]) == 1
        assert paged["waste"] > ours["waste"]
        needed = [sum(g["needed_bytes_mean"] for g in found["groups"]) for found in (ours, paged)]
        assert needed[0] == pytest.approx(needed[1], rel=0.05)

    def test_draft_tokens_save_steps_and_a_draft_model_takes_memory(
        self, replay: Any, tiny_config: Path
    ) -> None:
        flags = ("--num-speculative-tokens", "3", "--acceptance", "1")
        plain, free = replay(), replay(*flags)
        drafted = replay(*flags, "--speculative-model", tiny_config)
        assert plain["spec_decode_draft_tokens"] == 0
        assert free["spec_decode_accepted_tokens"] == free["spec_decode_draft_tokens"] > 0
        assert free["steps"] == drafted["steps"] < plain["steps"]
        assert drafted["virtual_seconds"] > free["virtual_seconds"]
        assert [group["name"] for group in drafted["groups"]] == [
            "sliding(128)",
            "full",
            "draft-sliding(128)",
            "draft-full",
        ]
        never = replay("--num-speculative-tokens", "3", "--acceptance", "0")
        assert never["spec_decode_accepted_tokens"] == 0

    def test_a_draft_model_alone_means_four_tokens(self, replay: Any, tiny_config: Path) -> None:
        alone = replay("--speculative-model", tiny_config)
        four = replay("--speculative-model", tiny_config, "--num-speculative-tokens", "4")
        assert alone["spec_decode_draft_tokens"] == four["spec_decode_draft_tokens"] > 0

    def test_requests_out(self, replay: Any, tmp_path: Path) -> None:
        path = tmp_path / "requests.jsonl"
        replay("--requests-out", path)
        first, second, refused = map(json.loads, path.read_text().splitlines())
        came, first_token, finished = (
            first.pop(name) for name in ("came_seconds", "first_token_seconds", "finish_seconds")
        )
        assert 0.0 == came < first_token < finished
        assert first == {
            "index": 0,
            "prompt_tokens": 200,
            "hit_tokens": 0,
            "admitted_step": 1,
            "first_token_step": 1,
            "finish_step": 4,
        }
        assert (second["hit_tokens"], second["admitted_step"]) == (128, 2)
        assert (refused["index"], refused["finish_step"]) == (2, None)

    def test_a_generator_instead_of_a_file(self, kvell: Kvell, tiny_config: Path) -> None:
        args = ("--trace", "mmlu-pro", "--limit", "5", "--model", tiny_config, "--json")
        found = [json.loads(kvell("replay", *args, "--seed", seed).stdout) for seed in ("1", "2")]
        assert [report["requests_finished"] for report in found] == [5, 5]
        assert found[0]["steps"] != found[1]["steps"]


class TestForAPerson:
    def test_tables(self, kvell: Kvell, tiny_config: Path, trace: Path) -> None:
        ended = kvell("replay", "--trace", trace, "--model", tiny_config, "--kv-memory", "16MiB")
        assert ended.code == 0
        assert "requests finished" in ended.stdout
        assert "sliding(128)" in ended.stdout
        assert "replaying" in ended.stderr


class TestNamedConfigs:
    @pytest.mark.parametrize("path", sorted((REPOSITORY / "bench" / "configs").glob("*.json")))
    def test_every_name_resolves(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert named_config(path.stem) == str(path)

    def test_a_path_wins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "llama3-8b").mkdir()
        assert named_config("llama3-8b") == "llama3-8b"

    def test_other_models_stay_what_they_are(self) -> None:
        assert named_config("smollm2") == "smollm2"


class TestBadInput:
    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--trace", "nowhere"], "--trace=nowhere: is neither a file nor a generator"),
            (["--hardware", "abacus"], "--hardware=abacus: is not a profile"),
            (["--kv-memory", "1KiB"], "--kv-memory=1KiB: is smaller than one page"),
            (["--kv-memory", "12KiB"], "holds no request of this model"),
            (["--arrivals", "later"], "later"),
            (["--limit", "0"], "--limit"),
            (["--requests-out", "/nowhere/at/all"], "--requests-out=/nowhere/at/all"),
        ],
    )
    def test_one_line(
        self, kvell: Kvell, tiny_config: Path, trace: Path, flags: list[str], said: str
    ) -> None:
        args = ("--trace", trace, "--model", tiny_config, "--kv-memory", "16MiB", *flags)
        ended = kvell("replay", *args)
        assert (ended.code, ended.stdout) == (2, "")
        assert said in ended.stderr.splitlines()[-1]

    def test_line_and_field_of_a_broken_trace(
        self, kvell: Kvell, tiny_config: Path, trace: Path
    ) -> None:
        trace.write_text(trace.read_text() + '{"arrival_s": 901}\n')
        ended = kvell("replay", "--trace", trace, "--model", tiny_config)
        assert ended.code == 2
        assert (
            f"--trace={trace}:4: output_tokens is missing; the first line's format is Kvell's"
            in ended.stderr
        )

    def test_unknown_layer_kinds_are_named(
        self, kvell: Kvell, tiny_config: Path, trace: Path
    ) -> None:
        kinds = json.loads(tiny_config.read_text())
        kinds["layer_types"][0] = "compressed_sparse_attention"
        tiny_config.write_text(json.dumps(kinds))
        ended = kvell("replay", "--trace", trace, "--model", tiny_config)
        assert ended.code == 2
        assert "compressed_sparse_attention" in ended.stderr


def test_an_image_is_in_the_text_unless_the_text_attends_to_it() -> None:
    full, across = (LayerSpec(i, kind, 1, 8, 2) for i, kind in enumerate(KINDS))
    assert images_in_text([full])
    assert not images_in_text([full, across])
