"""Checkpoints of a decoder's body: flat names, classes without a head, and no head in the files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import build_engine
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.models.families.families import FUSED
from kvell.models.loading.loading import check_model, load_paged_model
from kvell.models.loading.random_weights import random_module
from kvell.models.loading.weight_files import SINGLE_FILE
from tests.models.cases import MECHANISMS, families
from tests.models.harness import assert_exact, oracle_logits, prompt_ids, runner_over, tiny_config

CPU = torch.device("cpu")
IDS = prompt_ids(20)
DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def write_body(path: Path, architecture: str, *, tied: bool) -> Any:
    """Save a model's body with transformers; return it with an embedding that is its head."""
    config = tiny_config(architecture)
    module = random_module(config, seed=5, scale=8.0)
    with torch.no_grad():
        module.get_output_embeddings().weight.copy_(module.get_input_embeddings().weight)
    module.set_attn_implementation("eager")
    body = module.base_model if module.base_model is not module else module.model
    body.save_pretrained(path)
    raw = json.loads((path / "config.json").read_text())
    text = raw.get("text_config", raw)
    text["tie_word_embeddings"] = raw["tie_word_embeddings"] = tied
    (path / "config.json").write_text(json.dumps(raw))
    return module


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "architecture", families({*DENSE, *MECHANISMS.values()} - {"Llama4ForCausalLM"}, DENSE)
)
def test_a_body_is_computed_as_transformers_does(
    tmp_path: Path, architecture: str, tied: bool, fused: bool
) -> None:
    module = write_body(tmp_path, architecture, tied=tied)
    names = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert names[0].endswith("Model")
    assert not any(name.startswith("model.") for name in load_file(tmp_path / SINGLE_FILE))
    check_model(tmp_path)
    model = load_paged_model(tmp_path, choose_kernels(CPU), fused=fused)
    assert model.has_head is tied
    compiles = fused and architecture in FUSED and model.kernels.name == "native"
    assert (model.fused is not None) is compiles
    assert_exact(runner_over(model).step([("a", IDS)]), oracle_logits(module, IDS))


def test_flat_names_next_to_a_head(tmp_path: Path) -> None:
    module = write_body(tmp_path, "Qwen3ForCausalLM", tied=False)
    tensors = load_file(tmp_path / SINGLE_FILE)
    head = tensors["embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / SINGLE_FILE, {"format": "pt"})
    with torch.no_grad():
        module.lm_head.weight.copy_(head)
    for fused in (True, False):
        model = load_paged_model(tmp_path, choose_kernels(CPU), fused=fused)
        assert model.has_head
        assert_exact(runner_over(model).step([("a", IDS)]), oracle_logits(module, IDS))


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("llama", "Qwen3Model"),
        ("qwen3", "LlamaModel"),
        ("qwen3", "Qwen3ForSequenceClassification"),
        ("bert", "BertModel"),
        ("zamba", "ZambaModel"),
        ("qwen2_vl", "Qwen2VLModel"),
    ],
)
def test_other_classes_are_refused(tmp_path: Path, model_type: str, named: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    config.architectures = [named]
    config.save_pretrained(tmp_path)
    with pytest.raises(ChangeSomething, match="model="):
        check_model(tmp_path)


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("headless")
    write_body(path, "Qwen3ForCausalLM", tied=False)
    return path


@pytest.mark.parametrize("eager", [False, True])
def test_a_model_without_a_head_writes_no_text(headless: Path, eager: bool) -> None:
    prompt = {"prompt_token_ids": IDS}
    with LLM(headless, kv_memory="8MiB", dtype="float32", enforce_eager=eager) as llm:
        assert len(llm.embed([prompt])[0].embedding) == tiny_config("Qwen3ForCausalLM").hidden_size
        with pytest.raises(ChangeSomething) as refused:
            llm.generate([prompt], SamplingParams(max_tokens=2))
    assert refused.value.field == "model"
    for words in ("tie_word_embeddings is false", "lm_head.weight", "ask for embeddings"):
        assert words in str(refused.value)


def test_the_user_may_tie_the_head(headless: Path) -> None:
    overrides = {"tie_word_embeddings": True}
    with LLM(headless, kv_memory="8MiB", dtype="float32", hf_overrides=overrides) as llm:
        answer = llm.generate(
            [{"prompt_token_ids": IDS}],
            SamplingParams(max_tokens=2, temperature=0, ignore_eos=True),
        )[0]
    assert len(answer.token_ids) == 2


def test_a_model_without_a_head_drafts_nothing(headless: Path) -> None:
    model, draft = (load_paged_model(headless, choose_kernels(CPU)) for _ in range(2))
    options = EngineSettings(model="m", kv_memory_bytes=1 << 23, num_speculative_tokens=2)
    with pytest.raises(ChangeSomething, match=r"--speculative-model.*no lm_head\.weight"):
        build_engine(model, "m", options, draft=draft)
