"""Recorded answers of transformers, and comparisons with them."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.llm import LLM, RequestOutput
from kvell.models.config.description import describe
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.models.sources.packaged import MODEL_NAME
from kvell.vocabulary import KIB, MIB
from tests.llm.teacher import model_at
from tests.models.harness import tiny_module

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]
    near_ties: list[int]


def read_oracle() -> list[Answer]:
    lines = (DATA / "smollm2_greedy.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [Answer(r["prompt_token_ids"], r["token_ids"], r["near_ties"]) for r in rows]


def cut(answer: Answer, count: int) -> Answer:
    return Answer(answer.prompt, answer.tokens[:count], [])


def smollm2(cache: Path, **options: Any) -> LLM:
    options = {"kv_memory_bytes": 256 * MIB} | options
    return LLM(MODEL_NAME, dtype="float32", cache_dir=cache, **options)


def assert_same(outputs: Sequence[RequestOutput], answers: Sequence[Answer]) -> None:
    assert len(outputs) == len(answers)
    for output, answer in zip(outputs, answers, strict=True):
        assert output.prompt_token_ids == answer.prompt
        assert output.token_ids == answer.tokens, f"prompt {output.index}"


@cache
def _truth(path: Path, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        hidden = model_at(path).model(torch.tensor([ids])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(hidden, dim=0)


def truth(path: Path, ids: Sequence[int]) -> torch.Tensor:
    """transformers' hidden state of the last token, of length one; computed once."""
    return _truth(path, tuple(ids))


@dataclass
class Recorder:
    """A model that remembers the logits of its last step."""

    model: PagedModel
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.logits = self.model.forward(batch)
        return self.logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def prompts_with_shared_halves(count: int) -> dict[str, list[int]]:
    """Every second prompt repeats the first 32 tokens of the one before it."""
    draw = np.random.default_rng(5)
    prompts: dict[str, list[int]] = {}
    last: list[int] = []
    for index in range(count):
        fresh = draw.integers(3, 509, int(draw.integers(34, 60))).tolist()
        last = last[:32] + fresh[:9] if index % 2 else fresh
        prompts[f"q{index}"] = last
    return prompts


def model_of(architecture: str) -> PagedModel:
    """The tiny model over the kernels that serve on this machine; its module is a copy."""
    module = copy.deepcopy(tiny_module(architecture))
    return PagedModel(module, describe(module.config, 4), choose_kernels(torch.device("cpu")))


def small_engine(architecture: str, kv_kib: int, batched: int) -> tuple[Engine, Recorder]:
    recorder = Recorder(model_of(architecture))
    options = EngineOptions(
        kv_memory_bytes=kv_kib * KIB, max_model_len=96, max_num_batched_tokens=batched
    )
    engine = build_engine(recorder, architecture, options)  # type: ignore[arg-type]
    return engine, recorder
