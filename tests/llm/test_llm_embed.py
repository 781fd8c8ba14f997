"""``LLM.embed`` with real weights, against transformers' last hidden state."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvell.engine.protocol.pooling import EmbeddingOutput
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.models.loading.random_weights import write_random_model
from kvell.models.sources.packaged import MODEL_NAME
from kvell.vocabulary import MIB
from tests.llm.exactness import read_oracle, truth
from tests.llm.teacher import model_at, smollm2
from tests.models.harness import tiny_config

PROMPTS = [answer.prompt for answer in sorted(read_oracle(), key=lambda a: len(a.prompt))[::6]]
"""Token ids."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def check(path: Path, output: EmbeddingOutput) -> None:
    vector, expected = torch.tensor(output.embedding), truth(path, output.prompt_token_ids)
    assert float(vector @ expected) >= 1 - 1e-5
    assert float((vector - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


SOON: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 16}, {"enforce_eager": True}]
LATE: list[dict[str, Any]] = [
    {"max_num_seqs": 2},
    {"async_scheduling": True},
    {"kv_memory_bytes": None, "memory_bytes": 700 * MIB},
    {"num_speculative_tokens": 4},
    {
        "speculative_model": MODEL_NAME,
        "num_speculative_tokens": 2,
        "kv_memory_bytes": 256 * MIB,
    },
    {"manager": "paged"},
    {"cpu_buffer_bytes": 64 * MIB},
]


@pytest.mark.parametrize(
    "options",
    [*SOON, *(pytest.param(options, marks=pytest.mark.long) for options in LATE)],
    ids=lambda options: "-".join(options) or "plain",
)
def test_vectors_are_transformers(shallow_path: Path, options: dict[str, Any]) -> None:
    llm = smollm2(shallow_path, **options)
    for cached in (False, True):
        outputs = llm.embed(PROMPTS)
        assert len(outputs) == len(PROMPTS)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            check(shallow_path, output)
            assert output.prompt_token_ids == list(prompt)
            assert (output.cached_tokens > 0) == (cached and len(prompt) > 1)


def test_answers_and_vectors_share_what_is_cached(shallow_path: Path, llm: LLM) -> None:
    prompt = PROMPTS[-1]
    [fresh] = llm.generate([prompt], GREEDY)
    llm = smollm2(shallow_path)
    [vector] = llm.embed([prompt])
    [answer] = llm.generate([prompt], GREEDY)
    [again] = llm.embed([prompt])
    assert vector.cached_tokens == 0
    assert answer.cached_tokens == again.cached_tokens == len(answer.prompt_token_ids) - 1
    assert answer.token_ids == fresh.token_ids
    assert np.allclose(again.embedding, vector.embedding, atol=1e-6)
    check(shallow_path, again)


def test_prompts_are_texts_token_ids_and_mappings(shallow_path: Path, llm: LLM) -> None:
    ids = llm.tokenizer.encode("What is a page?").tolist()
    prompts: list[Any] = ["What is a page?", ids, {"prompt": "What is a page?"}]
    prompts += [{"prompt_token_ids": ids, "images": None}, np.asarray(ids)]
    outputs = llm.embed(prompts)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 5
    for output in outputs:
        check(shallow_path, output)
    assert llm.embed([]) == []


def test_the_longest_prompt_has_a_vector_and_a_longer_one_is_refused(shallow_path: Path) -> None:
    llm = smollm2(shallow_path, max_model_len=64)
    for ids in ([7] * 64, list(range(100, 164))):
        [output] = llm.embed([ids])
        check(shallow_path, output)
    with pytest.raises(ChangeSomething, match="65 tokens: is longer than --max-model-len 64"):
        llm.embed([[7], [7] * 65])
    assert llm.engine.core.stats().finished["refused"] == 0, "nothing was run"


@pytest.mark.parametrize(
    ("prompt", "pooling", "field"),
    [
        ("text", "mean", "pooling"),
        ([], "last", "prompt"),
        ([1 << 20], "last", "prompt"),
        ({"prompt": "text", "images": {"pixel_values": torch.zeros(1)}}, "last", "images"),
        ({"prompt": "text", "model": "another"}, "last", "model"),
    ],
)
def test_what_has_no_vector_is_refused_by_name(
    llm: LLM, prompt: Any, pooling: str, field: str
) -> None:
    before = llm.engine.core.stats().step
    with pytest.raises(ChangeSomething) as caught:
        llm.embed(["fine", prompt], pooling)
    assert caught.value.field == field
    assert caught.value.remedy
    assert llm.engine.core.stats().step == before


def test_each_of_several_models_gives_its_own(shallow_path: Path, tmp_path: Path) -> None:
    config = tiny_config("Gemma3ForCausalLM", vocab_size=49_152)
    small = write_random_model(tmp_path / "small", config, 1, scale=4.0)
    llm = smollm2(shallow_path, beside=[f"small={small}"])
    ids = list(range(100, 140))
    mixed: list[Any] = [{"prompt_token_ids": ids, "model": name} for name in (MODEL_NAME, "small")]
    first, second = llm.embed(mixed)
    check(shallow_path, first)
    with torch.no_grad():
        hidden = model_at(small).model(torch.tensor([ids])).last_hidden_state[0, -1]
    expected = torch.nn.functional.normalize(hidden, dim=0)
    assert np.allclose(second.embedding, expected.numpy(), atol=1e-5)
    (small / "modules.json").write_text(json.dumps([{"type": "x.Dense"}]))
    again = smollm2(shallow_path, beside=[f"small={small}"])
    check(shallow_path, again.embed(mixed[:1])[0])
    with pytest.raises(ChangeSomething, match="small: puts a module 'Dense'"):
        again.embed(mixed)


def test_16_bits_are_close(shallow_path: Path) -> None:
    llm = LLM(MODEL_NAME, dtype="bfloat16", cache_dir=shallow_path.parent, kv_memory_bytes=64 * MIB)
    for output in llm.embed(PROMPTS[::3]):
        expected = truth(shallow_path, output.prompt_token_ids)
        assert float(torch.tensor(output.embedding) @ expected) > 0.99
        assert abs(float(np.linalg.norm(output.embedding)) - 1) < 1e-6


def test_weights_without_a_head_and_without_its_prefix(shallow_path: Path, tmp_path: Path) -> None:
    """As models that were trained for embeddings are often saved (Qwen3-Embedding)."""
    path = tmp_path / "bare"
    model_at(shallow_path).model.save_pretrained(path)
    shutil.copy(shallow_path / "config.json", path)
    llm = LLM(str(path), dtype="float32", kv_memory_bytes=64 * MIB)
    [output] = llm.embed([list(range(100, 120))])
    check(shallow_path, output)


def test_a_vector_costs_no_step_of_its_own_beside_answers(shallow_path: Path) -> None:
    steps = []
    for embeds in (False, True):
        llm = smollm2(shallow_path)
        if embeds:
            llm.embed(PROMPTS[:3])
        before = llm.engine.core.stats().step
        llm.generate(PROMPTS[3:5], GREEDY)
        steps.append(llm.engine.core.stats().step - before)
        assert before == (1 if embeds else 0), "all vectors come with one step"
    assert steps[0] == steps[1] == 8
