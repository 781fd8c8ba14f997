"""``kvell generate``: the machine contract, and an answer for a person."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.errors import ChangeSomething
from tests.cli.conftest import FakeModel

Kvell = Callable[..., Any]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "first"}\n\n{"prompt_token_ids": [97, 98], "max_tokens": 1}\n{"prompt": "é"}\n'
    )
    return path


class TestMachineContract:
    def test_one_object_in_input_order(self, kvell: Kvell, prompts: Path) -> None:
        ended = kvell("generate", "--prompts", prompts, "--max-tokens", "3", "--json")
        assert ended.code == 0
        assert json.loads(ended.stdout)["requests"] == [
            {
                "index": index,
                "prompt_token_ids": [ord(char) for char in prompt],
                "token_ids": [ord(char) for char in text],
                "text": text,
                "cached_tokens": 0,
                "preemptions": 0,
                "finish_reason": "length",
            }
            for index, (prompt, text) in enumerate([("first", "FIR"), ("ab", "A"), ("é", "É")])
        ]

    def test_stats_stand_beside(self, kvell: Kvell, prompts: Path) -> None:
        found = json.loads(kvell("generate", "--prompts", prompts, "--json").stdout)
        assert found["stats"] == {"generation_seconds": 1.5, "max_running": 3}

    def test_stdout_is_one_line_and_progress_goes_to_stderr(
        self, kvell: Kvell, prompts: Path
    ) -> None:
        ended = kvell("generate", "--prompts", prompts, "--json")
        assert ended.stdout.count("\n") == 1
        assert ended.stderr == "kvell: loading weights …\n"

    def test_is_greedy_unless_told_otherwise(self, kvell: Kvell, model: Any, prompts: Path) -> None:
        kvell("generate", "--prompts", prompts, "--json")
        assert {sampling.temperature for _, sampling in model.asked} == {0.0}

    def test_prompts_of_a_file_get_no_chat_template(
        self, kvell: Kvell, model: Any, prompts: Path
    ) -> None:
        kvell("generate", "--prompts", prompts, "--json")
        assert [prompt for prompt, _ in model.asked] == ["first", "ab", "é"]

    def test_a_line_may_set_its_own_max_tokens(
        self, kvell: Kvell, model: Any, prompts: Path
    ) -> None:
        kvell("generate", "--prompts", prompts, "--max-tokens", "9", "--json")
        assert [sampling.max_tokens for _, sampling in model.asked] == [9, 1, 9]

    def test_a_line_may_name_its_model(self, kvell: Kvell, model: Any, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        lines = [{"prompt": "a", "model": "small"}, {"prompt_token_ids": [98]}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        given: list[Any] = []

        def generate(prompts: Any, *_: Any, **__: Any) -> list[Any]:
            given.extend(prompts)
            return []

        model.generate = generate
        models = ("--model", "smollm2", "--model", "small=dir")
        assert kvell("generate", "--prompts", path, "--json", *models).code == 0
        assert given[0] == {"prompt": "a", "model": "small"}
        assert given[1].tolist() == [98]
        assert (model.settings.model, model.settings.beside) == ("smollm2", ("small=dir",))

    @pytest.mark.parametrize("flags", [[], ["--sequential"]])
    def test_sequential(self, kvell: Kvell, model: Any, prompts: Path, flags: list[str]) -> None:
        kvell("generate", "--prompts", prompts, "--json", *flags)
        assert model.sequential == bool(flags)

    def test_sampling_flags_arrive(self, kvell: Kvell, model: Any, prompts: Path) -> None:
        flags = "--temperature 0.5 --top-k 7 --top-p 0.9 --seed 11 --ignore-eos"
        kvell("generate", "--prompts", prompts, *flags.split(), "--stop", "a b", "--stop", "c")
        sampling = model.asked[0][1]
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.9)
        assert (sampling.seed, sampling.ignore_eos) == (11, True)
        assert sampling.stop == ("a b", "c")

    def test_without_json_one_answer_a_line(self, kvell: Kvell, prompts: Path) -> None:
        assert kvell("generate", "--prompts", prompts).stdout == "[0] FIRST\n[1] A\n[2] É\n"

    def test_json_of_a_single_prompt(self, kvell: Kvell) -> None:
        found = json.loads(kvell("generate", "--prompt", "hi", "--json").stdout)
        assert [request["text"] for request in found["requests"]] == ["<USER>HI<ASSISTANT>"]

    def test_reads_stdin(self, kvell: Kvell, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "x"}\n'))
        assert kvell("generate", "--prompts", "-").stdout == "[0] X\n"


class TestEngineFlags:
    def test_all_arrive(self, kvell: Kvell, model: Any) -> None:
        flags = (
            "--model m --kv-memory 24GB --dtype bfloat16 --device cuda --max-model-len 4096 "
            "--max-num-batched-tokens 7 --max-num-seqs 3 --manager paged --kv-cache-dtype fp8 "
            "--quantization int8 --kv-budget pyramid:512"
        )
        kvell("generate", "--prompt", "x", *flags.split())
        settings = model.settings
        assert (settings.model, settings.kv_memory_bytes) == ("m", 24 * 10**9)
        assert (settings.dtype, settings.device, settings.max_model_len) == (
            "bfloat16",
            "cuda",
            4096,
        )
        assert (settings.max_num_batched_tokens, settings.max_num_seqs) == (7, 3)
        assert settings.manager == "paged"
        assert settings.kv_cache_dtype == "fp8"
        assert settings.kv_budget == "pyramid:512"
        assert settings.quantization == "int8"
        said = "--kv-cache-dtype fp8 --quantization int8 --kv-budget pyramid:512"
        assert said in " ".join(settings.flags())

    def test_defaults(self, kvell: Kvell, model: Any) -> None:
        kvell("generate", "--prompt", "x")
        assert (model.settings.model, model.settings.max_model_len) == ("smollm2", None)
        assert (model.settings.kv_budget, model.settings.quantization) == (None, "none")
        assert "--kv-budget" not in model.settings.flags()
        assert model.settings.kv_memory_bytes == 2**30  # a quarter of the 4 GiB available

    def test_one_bound_for_everything_leaves_kv_without_a_size(
        self, kvell: Kvell, model: Any
    ) -> None:
        kvell("generate", "--prompt", "x", "--memory", "2GiB")
        assert (model.settings.memory_bytes, model.settings.kv_memory_bytes) == (2 << 30, None)
        kvell("generate", "--prompt", "x", "--memory", "2GiB", "--kv-memory", "1GiB")
        assert (model.settings.memory_bytes, model.settings.kv_memory_bytes) == (2 << 30, 1 << 30)

    def test_a_buffer_of_host_memory_is_as_large_as_said(self, kvell: Kvell, model: Any) -> None:
        kvell("generate", "--prompt", "x", "--cpu-buffer", "3GiB")
        assert model.settings.cpu_buffer_bytes == 3 << 30
        assert "--cpu-buffer" in model.settings.flags()
        kvell("generate", "--prompt", "x")
        assert model.settings.cpu_buffer_bytes is None

    def test_objectives_are_seconds_above_nothing(self, kvell: Kvell, model: Any) -> None:
        kvell("generate", "--prompt", "x", "--slo-ttft", "1.5", "--slo-tpot", "0.2")
        assert (model.settings.slo_ttft_seconds, model.settings.slo_tpot_seconds) == (1.5, 0.2)
        assert kvell("generate", "--prompt", "x", "--slo-tpot", "0").code == 2
        kvell("generate", "--prompt", "x")
        assert (model.settings.slo_ttft_seconds, model.settings.slo_tpot_seconds) == (None, None)

    def test_a_gpu_gets_no_default_from_host_memory(self, kvell: Kvell, model: Any) -> None:
        kvell("generate", "--prompt", "x", "--device", "cuda")
        assert model.settings.kv_memory_bytes is None


class TestForAPerson:
    def test_answer_on_stdout_and_the_rest_on_stderr(self, kvell: Kvell) -> None:
        ended = kvell("generate", "--prompt", "hi")
        assert ended.code == 0
        assert ended.stdout == "<USER>HI<ASSISTANT>\n"
        assert ended.stderr.index("KV pool 2 MiB") < ended.stderr.index("next: kvell chat")

    def test_raw_skips_the_chat_template(self, kvell: Kvell) -> None:
        assert kvell("generate", "--prompt", "hi", "--raw").stdout == "HI\n"

    def test_a_base_model_has_no_chat_template(self, kvell: Kvell, model: Any) -> None:
        model.tokenizer.has_chat_template = False
        assert kvell("generate", "--prompt", "hi").stdout == "HI\n"

    def test_says_how_long_it_took(self, kvell: Kvell) -> None:
        stderr = kvell("generate", "--prompt", "abcd", "--raw").stderr
        assert "first words 0.5 s after the start, 1.5 s of writing" in stderr
        assert "the model ended its answer" in stderr

    def test_refusal_of_the_engine(self, kvell: Kvell, model: Any) -> None:
        model.fails = ChangeSomething("max_model_len", 4, "is too short", "use 5")
        ended = kvell("generate", "--prompt", "hello", "--raw")
        assert ended.code == 2
        assert ended.stderr.endswith("kvell: --max-model-len=4: is too short; use 5\n")

    def test_the_text_may_stand_without_its_flag(self, kvell: Kvell) -> None:
        assert kvell("generate", "hi").stdout == kvell("generate", "--prompt", "hi").stdout
        assert kvell("generate", "--raw", "--", "--hi").stdout == "--HI\n"

    @pytest.mark.parametrize(
        "flags", [[], ["--prompt", "a", "--prompts", "b"], ["a b", "--prompt", "a"]]
    )
    def test_needs_one_kind_of_prompt(
        self, kvell: Kvell, monkeypatch: pytest.MonkeyPatch, flags: list[str]
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        ended = kvell("generate", *flags)
        assert ended.code == 2
        assert ended.stderr.startswith("kvell: Give one of TEXT, --prompt and --prompts")

    def test_reads_a_text_on_stdin(self, kvell: Kvell, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\nthere\n"))
        assert kvell("generate", "--raw").stdout == "HELLO\nTHERE\n"

    def test_a_model_and_a_text(self, kvell: Kvell, model: FakeModel) -> None:
        assert kvell("generate", "some/model", "hi", "--raw").stdout == "HI\n"
        assert model.settings is not None
        assert model.settings.model == "some/model"

    def test_a_name_next_to_a_prompt_is_a_model(self, kvell: Kvell, model: FakeModel) -> None:
        assert kvell("generate", "some/model", "--prompt", "hi", "--raw").code == 0
        assert model.settings is not None
        assert model.settings.model == "some/model"

    def test_more_than_a_model_and_a_text_is_refused(self, kvell: Kvell) -> None:
        ended = kvell("generate", "what", "is", "it")
        assert ended.code == 2
        assert "put quotation marks around a text" in ended.stderr


class TestBadFiles:
    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("{", ":2: is not JSON"),
            ("[1]", ":2: is not a JSON object"),
            ("{}", ":2: must have either prompt or prompt_token_ids"),
            ('{"prompt": "a", "prompt_token_ids": [1]}', ":2: must have either"),
            ('{"prompt": 5}', ":2: has a prompt that is not text"),
            ('{"prompt_token_ids": "a"}', ":2: has prompt_token_ids that are not a list"),
            ('{"prompt_token_ids": [1, true]}', ":2: has prompt_token_ids that are not a list"),
            ('{"prompt_token_ids": [-1]}', ":2: has a token id out of range"),
            ('{"prompt_token_ids": [2147483648]}', ":2: has a token id out of range"),
            ('{"prompt": "a", "model": 3}', ":2: has a model that is not text"),
            ('{"prompt": "a", "max_tokens": 0}', ":2: has max_tokens that is not"),
            ('{"prompt": "a", "max_tokens": "9"}', ":2: has max_tokens that is not"),
            ('{"prompt": "a", "images": ["x.png"]}', ":2: has images, which cannot be served"),
        ],
    )
    def test_names_the_line(self, kvell: Kvell, tmp_path: Path, line: str, problem: str) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text('{"prompt": "fine"}\n' + line + "\n")
        ended = kvell("generate", "--prompts", path, "--json")
        assert (ended.code, ended.stdout) == (2, "")
        assert ended.stderr.startswith(f"kvell: --prompts={path}{problem}")

    def test_empty(self, kvell: Kvell, tmp_path: Path) -> None:
        path = tmp_path / "empty.jsonl"
        path.write_text("\n \n")
        assert "holds no prompts" in kvell("generate", "--prompts", path).stderr

    def test_missing(self, kvell: Kvell, tmp_path: Path) -> None:
        assert "No such file" in kvell("generate", "--prompts", tmp_path / "none").stderr

    def test_not_utf8(self, kvell: Kvell, tmp_path: Path) -> None:
        path = tmp_path / "latin.jsonl"
        path.write_bytes(b'{"prompt": "\xe9"}')
        assert "is not UTF-8 text" in kvell("generate", "--prompts", path).stderr

    def test_is_read_before_the_model_is_loaded(
        self, kvell: Kvell, model: Any, tmp_path: Path
    ) -> None:
        kvell("generate", "--prompts", tmp_path / "none")
        assert model.settings is None

    def test_line_separators_inside_text_do_not_end_a_line(
        self, kvell: Kvell, tmp_path: Path
    ) -> None:
        path = tmp_path / "separators.jsonl"
        path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
        assert kvell("generate", "--prompts", path).stdout == "[0] A\u2028B\n"
