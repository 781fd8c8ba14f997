"""A whole engine over a tiny model with random weights, and the oracle's word on its answers."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Cancel, Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import GroupKind, Layout, Manager, audit, plan_layout
from kvell.models.config.description import describe
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.models.harness import tiny_module

MAX_MODEL_LEN = 256


@dataclass
class Recorder:
    """A model that remembers the batch and the logits of its last step, and its pool."""

    model: PagedModel
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    pool: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def attach(self, layout: Layout, pool: torch.Tensor) -> None:
        self.pool = pool.fill_(0xFF)  # not a number, wherever nothing was written
        self.model.attach(layout, pool)

    def forward(self, batch: ForwardBatch, callbacks: LayerCallbacks | None = None) -> torch.Tensor:
        self.logits = self.model.forward(batch, callbacks)
        return self.logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@dataclass
class Answer:
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def cached_tokens(self) -> int:
        assert self.finished is not None
        return self.finished.cached_tokens


class Audited(ABC):
    """Steps of an engine; the memory is audited after every one."""

    engine: Engine
    answers: dict[str, Answer]

    @property
    def layout(self) -> Layout:
        return self.engine.core.memory.layout

    def cancel(self, name: str) -> None:
        self._note(self.engine.handle(Cancel(RequestId(name))))

    def step(self) -> None:
        self._note(self.engine.step())
        assert audit(self.layout, self.engine.core.memory.snapshot()) == []

    def run(self) -> None:
        while self.engine.has_work():
            self.step()

    @abstractmethod
    def _note(self, events: Sequence[object]) -> None:
        """Write events into the answers they belong to."""


class Served(Audited):
    def __init__(
        self,
        architecture: str,
        kv_bytes: int = 8 * MIB,
        batched: int = 256,
        max_model_len: int = MAX_MODEL_LEN,
        kv_dtype: torch.dtype = torch.float32,
        manager: Manager = "kvell",
        **more: Any,
    ) -> None:
        """:param more: further options of the engine; copies are under passes by default."""
        more = {"copies_under_pass": True} | more
        self.architecture = architecture
        module = copy.deepcopy(tiny_module(architecture))
        kernels = choose_kernels(torch.device("cpu"))
        description = describe_as(module.config, torch.float32, kv_dtype)
        self.recorder = Recorder(PagedModel(module, description, kernels, kv_dtype))
        options = EngineOptions(
            kv_memory_bytes=kv_bytes,
            max_model_len=max_model_len,
            max_num_batched_tokens=batched,
            manager=manager,
            **more,
        )
        self.engine = build_engine(self.recorder, architecture, options)  # type: ignore[arg-type]
        self.answers = {}

    def submit(self, name: str, prompt: Sequence[int], outputs: int = 8) -> None:
        self.answers[name] = Answer(list(prompt))
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        command = Submit(RequestSpec(RequestId(name), np.asarray(prompt, "<i4").tobytes(), params))
        assert is_accepted(self.engine.handle(command))

    def ask(self, name: str, prompt: Sequence[int], outputs: int = 8) -> Answer:
        self.submit(name, prompt, outputs)
        self.run()
        return self.answers[name]

    def page_bytes(self, group: int, page: int) -> torch.Tensor:
        stride = self.layout.groups[group].page_stride_bytes
        return self.recorder.pool[page * stride : (page + 1) * stride]

    def _note(self, events: Sequence[object]) -> None:
        drawn = [event for event in events if isinstance(event, Tokens)]
        for event, row in zip(drawn, self.recorder.logits, strict=bool(drawn)):
            answer = self.answers[event.request_id]
            answer.output += event.token_ids
            answer.logits.append(row.clone())  # a recorded step overwrites them
        for end in (event for event in events if isinstance(event, Finished)):
            self.answers[end.request_id].finished = end


def layout_of(architecture: str, kv_bytes: int = 8 * MIB) -> Layout:
    return plan_layout(describe(tiny_module(architecture).config, 4).layers, kv_bytes)


def oracle_rows(architecture: str, answer: Answer) -> torch.Tensor:
    """transformers' logits before each output token, teacher-forced; [outputs, vocab]."""
    return _oracle_rows(architecture, tuple(answer.prompt), tuple(answer.output))


@lru_cache(maxsize=256)
def _oracle_rows(
    architecture: str, prompt: tuple[int, ...], output: tuple[int, ...]
) -> torch.Tensor:
    """Kept, since most tests of a family ask about the same answers."""
    known = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits: torch.Tensor = tiny_module(architecture)(known, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].clone()


def error(architecture: str, answer: Answer) -> float:
    """Largest difference of logits, in parts of the largest logit; NaN if there were none."""
    if not answer.logits:
        assert answer.finished is not None and answer.finished.reason == "error"
        return float("nan")
    expected = oracle_rows(architecture, answer)
    return float((torch.stack(answer.logits) - expected).abs().max() / expected.abs().max())


def assert_answer(architecture: str, answer: Answer) -> None:
    """Logits within 1e-4 of the largest, and greedy tokens the oracle's but for near ties."""
    assert error(architecture, answer) <= 1e-4
    for token, row in zip(answer.output, oracle_rows(architecture, answer), strict=True):
        best, second = row.topk(2).values.tolist()
        assert token == int(row.argmax()) or best - second < 1e-4 * float(row.abs().max())


def assert_all(served: Served) -> None:
    for answer in served.answers.values():
        assert_answer(served.architecture, answer)
    outputs = [token for answer in served.answers.values() for token in answer.output]
    assert len(set(outputs)) > len(outputs) // 4, "answers that repeat themselves prove nothing"


def has_attention(architecture: str) -> bool:
    return any(group.kind is not GroupKind.STATE for group in layout_of(architecture).groups)
