"""``kvell plan``: what fits, per group."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.models.sources.packaged import gguf_file

Kvell = Callable[..., Any]


@pytest.fixture
def plan(kvell: Kvell, tiny_config: Path) -> Callable[..., Any]:
    def call(*flags: str) -> Any:
        ended = kvell("plan", "--model", tiny_config, "--json", *flags)
        assert ended.code == 0, ended.stderr
        return json.loads(ended.stdout)

    return call


class TestJson:
    def test_groups_by_kind(self, plan: Any) -> None:
        groups = plan("--kv-memory", "64MiB")["groups"]
        assert [(g["kind"], g["window_tokens"], g["layers"]) for g in groups] == [
            ("sliding", 128, [0, 1, 2, 3, 4]),
            ("full", 0, [5]),
        ]

    def test_bytes_per_token_follow_from_the_config(self, plan: Any) -> None:
        groups = plan("--kv-memory", "64MiB")["groups"]
        one_layer = 2 * 1 * 32 * 2  # K and V, heads, head size, bfloat16
        assert [group["token_bytes"] for group in groups] == [5 * one_layer, one_layer]

    def test_large_pages_are_made_of_whole_pages(self, plan: Any) -> None:
        found = plan("--kv-memory", "64MiB")
        for group in found["groups"]:
            stride_bytes = group["page_bytes"] + group["padding_bytes"]
            assert stride_bytes * group["pages_per_large_page"] == found["large_page_bytes"]
        assert found["pool_bytes"] == found["large_page_bytes"] * found["num_large_pages"]
        assert 63 * 2**20 < found["pool_bytes"] <= 64 * 2**20

    def test_dtype_doubles_a_token(self, plan: Any) -> None:
        narrow, wide = plan("--dtype", "auto"), plan("--dtype", "float32")
        assert narrow == plan("--dtype", "bfloat16")
        assert wide["groups"][0]["token_bytes"] == 2 * narrow["groups"][0]["token_bytes"]

    @pytest.mark.parametrize("name", ["int8", "fp8"])
    def test_quantised_tokens_carry_their_scales(self, plan: Any, name: str) -> None:
        groups = plan("--kv-cache-dtype", name, "--kv-memory", "64MiB")["groups"]
        one_layer = 2 * 1 * (32 + 4)  # K and V, heads, head size and a float32
        assert [group["token_bytes"] for group in groups] == [5 * one_layer, one_layer]

    def test_paged_keeps_every_token_in_every_layer(self, plan: Any) -> None:
        ours, paged = plan("--kv-memory", "64MiB"), plan("--kv-memory", "64MiB", "--manager=paged")
        assert len(paged["groups"]) == 1
        assert at_full_length(ours) > 3 * at_full_length(paged)

    def test_default_memory_is_a_quarter_of_what_is_free(self, plan: Any) -> None:
        assert 2**30 * 0.99 < plan()["pool_bytes"] <= 2**30

    def test_lengths_end_at_the_models_own(self, plan: Any) -> None:
        lengths = [fit["request_tokens"] for fit in plan()["requests_that_fit"]]
        assert lengths == [1024, 4096]

    def test_small_pool_shortens_the_longest_request(self, plan: Any) -> None:
        found = plan("--kv-memory", "256KiB")
        assert 0 < found["longest_request_tokens"] < found["max_model_len"] == 4096
        assert at_full_length(found) == 0


def at_full_length(found: Any) -> int:
    return int(found["requests_that_fit"][-1]["requests"])


class TestForAPerson:
    def test_tables(self, kvell: Kvell, tiny_config: Path) -> None:
        ended = kvell("plan", "--model", tiny_config, "--kv-memory", "64MiB")
        assert ended.code == 0
        assert "Gemma3ForCausalLM" in ended.stdout
        assert "sliding(128)" in ended.stdout
        assert "4,096 tokens" in ended.stdout

    def test_says_what_one_full_request_needs(self, kvell: Kvell, tiny_config: Path) -> None:
        stdout = kvell("plan", "--model", tiny_config, "--kv-memory", "256KiB").stdout
        assert "one request of 4,096 tokens needs" in stdout


class TestBadInput:
    def test_memory_below_one_page(self, kvell: Kvell, tiny_config: Path) -> None:
        ended = kvell("plan", "--model", tiny_config, "--kv-memory", "1KiB")
        assert ended.code == 2
        assert ended.stderr.splitlines()[-1].startswith("kvell: --kv-memory=1KiB: ")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("{", "is not valid JSON"),
            ("[]", "holds no JSON object"),
            ('{"model_type": "frobnicator"}', "unknown model type"),
        ],
    )
    def test_broken_config(self, kvell: Kvell, tmp_path: Path, text: str, problem: str) -> None:
        path = tmp_path / "config.json"
        path.write_text(text)
        ended = kvell("plan", "--model", path)
        assert (ended.code, ended.stdout) == (2, "")
        assert problem in ended.stderr.splitlines()[-1]

    def test_directory_without_a_config(self, kvell: Kvell, tmp_path: Path) -> None:
        ended = kvell("plan", "--model", tmp_path)
        assert ended.code == 2
        assert "holds no config.json" in ended.stderr


CONFIGS = Path(__file__).parents[3] / "bench" / "configs"


class TestOtherKinds:
    @pytest.fixture
    def shape(self, kvell: Kvell) -> Callable[..., Any]:
        def call(name: str, *flags: str) -> Any:
            path = CONFIGS / f"{name}.json"
            ended = kvell("plan", "--model", path, "--json", "--kv-memory", "6GiB", *flags)
            assert ended.code == 0, ended.stderr
            return json.loads(ended.stdout)

        return call

    def test_paged_grows_pages_until_they_hold_a_state(self, shape: Any) -> None:
        tokens = [
            group["page_tokens"] for group in shape("jamba-mini", "--manager=paged")["groups"]
        ]
        assert tokens == [80, 1]

    def test_cross_attention_is_a_group_of_images(self, shape: Any) -> None:
        full, cross = shape("llama-3.2-11b-vision")["groups"]
        assert (full["kind"], cross["kind"], len(cross["layers"])) == ("full", "cross", 8)
        (paged,) = shape("llama-3.2-11b-vision", "--manager=paged")["groups"]
        assert (paged["counts_images"], full["counts_images"]) == (True, False)

    def test_a_person_reads_what_a_state_takes(self, kvell: Kvell) -> None:
        path = CONFIGS / "jamba-mini.json"
        stdout = kvell("plan", "--model", path, "--kv-memory", "6GiB").stdout
        assert "every request holds one state of 8.31 MiB in 28 pages" in stdout
        assert "state of 1" in stdout

    def test_a_person_reads_which_pages_hold_images(self, kvell: Kvell) -> None:
        path = CONFIGS / "llava-onevision-7b.json"
        stdout = kvell("plan", "--model", path, "--kv-memory", "6GiB").stdout
        assert "16 of an image" in stdout


class TestSeveralModels:
    def test_one_pool_and_each_model_in_it(self, kvell: Kvell, tiny_config: Path) -> None:
        other = CONFIGS / "jamba-mini.json"
        models = ("--model", f"tiny={tiny_config}", "--model", f"big={other}")
        ended = kvell("plan", *models, "--json", "--kv-memory", "6GiB")
        assert ended.code == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert [group["name"] for group in found["groups"]] == [
            "tiny:sliding(128)",
            "tiny:full",
            "big:state",
            "big:full",
        ]
        (big,) = found["beside"]
        assert (found["model"], found["max_model_len"]) == ("tiny", 4096)
        assert (big["model"], big["max_model_len"]) == ("big", 262_144)
        assert big["weights_bytes"] > found["weights_bytes"]
        assert found["devices"] == []

    def test_a_person_reads_a_table_for_each(self, kvell: Kvell, tiny_config: Path) -> None:
        models = ("--model", f"tiny={tiny_config}", "--model", f"twin={tiny_config}")
        stdout = kvell("plan", *models, "--kv-memory", "64MiB").stdout
        assert stdout.startswith(
            "tiny (Gemma3ForCausalLM), twin (Gemma3ForCausalLM), manager kvell: "
        )
        for name in ("tiny", "twin"):
            assert f"{name}: longest request: 4,096 tokens" in stdout
            assert f"Requests to {name}, while decoding" in stdout


class TestGguf:
    def test_a_file_is_planned_by_its_blocks(self, kvell: Kvell) -> None:
        """Its matrices take about as much memory as they do in the file."""
        file = gguf_file()
        ended = kvell("plan", "--model", file, "--kv-memory", "64MiB", "--json")
        assert ended.code == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert (
            found["stored_as"] == "GGUF's Q4_1, Q8_0; read into int4 and int8, with an error of 0 %"
        )
        assert 0.9 < found["weights_bytes"] / file.stat().st_size < 1.1

    @pytest.mark.parametrize(
        ("given", "problem"),
        [
            ("/nowhere/model.gguf", "there is no such file; use smollm2"),
            ("owner/name:Q4_K_M", "has its sizes in a GGUF file that is not downloaded; plan"),
        ],
    )
    def test_a_file_that_is_not_here_is_named(
        self, given: str, problem: str, kvell: Kvell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        ended = kvell("plan", "--model", given)
        assert ended.code == 2
        assert problem in ended.stderr
