"""A model and requests for instances that lend: some prompts are longer than one's memory."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvell import LLM
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.models.loading.random_weights import write_random_model
from kvell.vocabulary import MIB
from tests.async_engine.jobs import Job
from tests.models.harness import tiny_config

WORDS = 49_152
KV_BYTES = 56 * MIB
"""Of an instance: 1,792 tokens, three sections and a little."""
LONG_TOKENS = (2600, 3200)
SHORT_TOKENS = (40, 200)


def wide_model(smollm2_path: Path, directory: Path) -> Path:
    """Write a model of little work and large pages, 32 KiB a token."""
    config = tiny_config(
        "LlamaForCausalLM",
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        vocab_size=WORDS,
    )
    path = write_random_model(directory, config, seed=1)
    _copy_tokenizer(smollm2_path, path)
    return path


def draft_model(smollm2_path: Path, directory: Path) -> Path:
    """Write a draft model of one layer, which is hardly ever right."""
    config = tiny_config(
        "LlamaForCausalLM",
        num_hidden_layers=1,
        max_position_embeddings=8192,
        vocab_size=WORDS,
    )
    path = write_random_model(directory, config, seed=2)
    _copy_tokenizer(smollm2_path, path)
    return path


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, target)


def everything(smollm2_path: Path, directory: Path) -> dict[str, Any]:
    """All that an instance can have, as arguments of an :class:`.AsyncEngine`."""
    return {
        "model": str(wide_model(smollm2_path, directory / "wide")),
        "speculative_model": str(draft_model(smollm2_path, directory / "draft")),
        "dtype": "float32",
        "memory_bytes": 100 * MIB,
        "cpu_buffer_bytes": 48 * MIB,
        "slo_ttft_seconds": 0.01,
        "async_scheduling": True,
    }


def long_jobs(directory: Path) -> list[Job]:
    chance = random.Random(7)
    sizes = [chance.randrange(*(SHORT_TOKENS if i % 2 else LONG_TOKENS)) for i in range(12)]
    return jobs_of(directory, [_words(chance, size) for size in sizes])


def mixed_jobs(directory: Path) -> list[Job]:
    chance = random.Random(8)
    shared = [_words(chance, 300) for _ in range(2)]
    middle = [shared[i % 2] + _words(chance, chance.randrange(60, 500)) for i in range(24)]
    return [*long_jobs(directory), *jobs_of(directory, middle)]


def _words(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(3, WORDS) for _ in range(count)]


def jobs_of(directory: Path, prompts: Sequence[list[int]]) -> list[Job]:
    """Prompts, greedy and drawn ones in turn, and right answers."""
    asked = [
        SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=16 + 8 * (i % 4), ignore_eos=True)
        for i in range(len(prompts))
    ]
    llm = LLM(str(directory), dtype="float32", kv_memory_bytes=8 * KV_BYTES)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)
    return [
        Job(prompt, params, output.token_ids)
        for prompt, params, output in zip(prompts, asked, outputs, strict=True)
    ]
