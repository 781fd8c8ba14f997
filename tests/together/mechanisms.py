"""Single engines with any set of mechanisms under pressure, and signs that each of them acted."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.statistics import Stats
from kvell.engine.requests.plan import StepPlan
from kvell.engine.setup.several_models import ServedModel
from kvell.memory import GroupKind, as_draft, audit, plan_layout, pool_bytes_for
from kvell.models.images.image_content import ImagePrompt
from kvell.models.loading.loading import describe_as
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import PagedModel
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.engine.seen import use_rule
from tests.engine.swapping import Always
from tests.models.fused_models import fused_model
from tests.models.harness import tiny_config
from tests.models.pictures import PATCHES, PLACEHOLDER, picture_module, pictured, text

TEXT, STATES, SECOND, DRAFT = (
    "Gemma3ForCausalLM",
    "FalconH1ForCausalLM",
    "LlamaForCausalLM",
    "LlamaForCausalLM",
)
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 6,
    "max_position_embeddings": 2048,
}
"""Sizes with which few requests fill a pool of some chunks."""
MIXED = ["full_attention", "sliding_attention"] * 3
"""Layers of a model with windows: half of them keep all tokens."""
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
MAX_MODEL_LEN = 256
BATCHED = 128
SHARED_MIB = 8
"""Size of a pool of KV and activations, which holds a few of the requests."""
RESERVE_MIB = 96
"""What ``--memory`` leaves besides for a model whose activations torch allocates."""
CHANGES_ANSWERS = ("two models", "images", "hybrid", "int8")
"""Mechanisms without which answers are different ones."""


@cache
def module_of(architecture: str) -> Any:
    """Return a module of few sizes; of a draft model, the tiny one."""
    own = {"layer_types": MIXED} if architecture == TEXT else {}
    return random_module(tiny_config(architecture, **WIDE, **own), 3)


@cache
def draft_module() -> Any:
    return random_module(tiny_config(DRAFT, max_position_embeddings=2048), 4)


def models_of(mechanisms: Sequence[str]) -> list[PagedModel]:
    """Return the models of an engine, the first one first."""
    kv_dtype = torch.int8 if "int8" in mechanisms else None
    names = [STATES if "hybrid" in mechanisms else TEXT]
    if "two models" in mechanisms:
        names.append(SECOND)
    models = [fused_model(module_of(name), kv_dtype=kv_dtype) for name in names]
    if "images" in mechanisms:
        models = [
            _picture_model(kv_dtype),
            *models[: "two models" in mechanisms or "hybrid" in mechanisms],
        ]
    return models


def _picture_model(kv_dtype: torch.dtype | None) -> PagedModel:
    module = copy.deepcopy(picture_module(PATCHES))
    description = describe_as(module.config, torch.float32, kv_dtype or torch.float32)
    return PagedModel(module, description, choose_kernels(torch.device("cpu")), kv_dtype)


def engine_with(mechanisms: Sequence[str], **more: Any) -> Engine:
    """Build an engine whose pool is short of memory for :func:`requests_for`."""
    models = models_of(mechanisms)
    is_shared = "memory" in mechanisms
    draft = fused_model(draft_module()) if "draft" in mechanisms else None
    weights = sum(model.weight_bytes for model in [*models, *([draft] if draft else [])])
    has_slots = "images" not in mechanisms
    shared_mib = SHARED_MIB + RESERVE_MIB * (not has_slots)
    options: dict[str, Any] = {
        "kv_memory_bytes": None if is_shared and has_slots else _short_bytes(models, draft),
        "memory_bytes": weights + shared_mib * MIB if is_shared else None,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": BATCHED,
        "async_scheduling": "async" in mechanisms,
        "cpu_buffer_bytes": 32 * MIB if {"buffer", "offload"} & set(mechanisms) else None,
        "slo_ttft_seconds": 1e-4 if "offload" in mechanisms else None,
        "num_speculative_tokens": 3 if "draft" in mechanisms else 0,
    }
    beside = [ServedModel(f"m{i + 1}", model) for i, model in enumerate(models[1:])]
    engine = build_engine(
        models[0], "m0", EngineOptions(**options | more), draft=draft, beside=beside
    )
    swapping = engine.core.scheduler.swapping
    if swapping is not None:
        assert swapping.prefixes is not None
        use_rule(swapping, Always())  # tiny models compute any page faster
    if "offload" in mechanisms:
        _offload_alone(engine)
    return engine


def _offload_alone(engine: Engine) -> None:
    """Let prompts without room go to the buffer always: decodes give way to none."""
    parking = engine.core.scheduler.parking
    assert parking is not None
    parking.sizes.logical_chunks = parking.sizes.physical_chunks
    parking.give_way = lambda request, running, admitted: []  # type: ignore[method-assign]


def _short_bytes(models: Sequence[PagedModel], draft: PagedModel | None) -> int:
    """Return the bytes of a pool for about two requests of the model that needs most."""
    drafts = () if draft is None else as_draft(draft.description.layers)
    needs = []
    for number, model in enumerate(models):
        layers = [*model.description.layers, *(drafts if not number else ())]
        layout = plan_layout(layers, 64 * MIB)
        needs.append(pool_bytes_for(layout, MAX_MODEL_LEN, BATCHED))
    return max(needs) * 3 // 2


@dataclass(frozen=True)
class Asked:
    """A request: its tokens and pictures, and the model that it is for."""

    token_ids: list[int]
    model: str = ""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def requests_for(mechanisms: Sequence[str]) -> dict[str, Asked]:
    """Return requests for all models of an engine; some share a beginning."""
    models = [f"m{i}" for i in range(len(models_of(mechanisms)))]
    asked: dict[str, Asked] = {}
    shared: list[int] = []
    for number in range(12):
        model = models[number % len(models)]
        own = text(40 + (99 - 37 * number) % 100, number)
        shared = own if number % 3 == 0 else shared
        name = "" if len(models) == 1 else model
        if "images" in mechanisms and model == "m0" and number % 4 < 2:
            seen = pictured(PATCHES, text(9), number // 3 % 3, own[:70])
            asked[f"q{number}"] = Asked(seen.token_ids, name, seen.tensors)
        else:
            asked[f"q{number}"] = Asked([*shared[:32], *own], name)
    return asked


@dataclass
class Run:
    """The answers of an engine, and what it did for them.

    :ivar planned_ahead: plans that were made while a step ran.
    """

    engine: Engine
    outputs: dict[str, list[int]] = field(default_factory=dict)
    planned_ahead: int = 0

    def __post_init__(self) -> None:
        plan = self.engine.core.scheduler.plan

        def counted(step: Any, in_flight: int = 0, *more: Any) -> StepPlan:
            self.planned_ahead += in_flight
            return plan(step, in_flight, *more)

        self.engine.core.scheduler.plan = counted  # type: ignore[method-assign,assignment]

    def submit(self, name: str, asked: Asked) -> None:
        prompt = ImagePrompt(np.asarray(asked.token_ids, np.int32), ())
        if asked.tensors:
            assert self.engine.images is not None
            prompt = self.engine.images.take(prompt.token_ids, dict(asked.tensors))
        ids = prompt.token_ids.astype("<i4").tobytes()
        spec = RequestSpec(RequestId(name), ids, GREEDY, model=asked.model, images=prompt.images)
        self.outputs[name] = []
        assert is_accepted(self.engine.handle(Submit(spec)))

    def step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, Tokens):
                self.outputs[event.request_id] += event.token_ids
            elif isinstance(event, Finished):
                assert event.reason == "length"
        core = self.engine.core
        assert audit(core.memory.layout, core.memory.snapshot()) == []

    def serve(self, asked: Mapping[str, Asked], at_once: int = 12) -> None:
        """Serve requests, and then the next turn of each, which begins with its first answer.

        :param at_once: requests that run at the same time, as far as there is memory.
        """
        names = list(asked)
        for turn in range(2):
            for first in range(0, len(names), at_once):
                for name in names[first : first + at_once]:
                    request = self._next(name, asked[name]) if turn else asked[name]
                    self.submit(f"{name}/{turn}", request)
                while self.engine.has_work():
                    self.step()
        assert not any(self.engine.core.memory.snapshot().used)

    def _next(self, name: str, request: Asked) -> Asked:
        answer = [3 if token == PLACEHOLDER else token for token in self.outputs[f"{name}/0"]]
        return replace(request, token_ids=[*request.token_ids, *answer, *text(5)])

    @property
    def stats(self) -> Stats:
        return self.engine.core.stats()


SIGNS: dict[str, Callable[[Run], object]] = {
    "memory": lambda run: (
        run.stats.rungs["inflate"] + run.stats.rungs["deflate"]
        if run.stats.memory
        else run.engine.contract.activation_reserve_bytes
    ),
    "buffer": lambda run: run.stats.buffer["out_pages"] and run.stats.buffer["in_pages"],
    "offload": lambda run: run.stats.rungs["offload_prompt"],
    "draft": lambda run: run.stats.spec_decode_draft_tokens,
    "async": lambda run: run.planned_ahead,
    "two models": lambda run: (
        len({group.model for group in run.engine.core.memory.layout.groups}) > 1
    ),
    "images": lambda run: run.engine.images is not None and run.engine.images.encoder_runs,
    "hybrid": lambda run: any(
        group.kind is GroupKind.STATE for group in run.engine.core.memory.layout.groups
    ),
    "int8": lambda run: True,
}
"""What shows that a mechanism acted in a run."""


@cache
def expected(mechanisms: frozenset[str]) -> dict[str, list[int]]:
    """Return what engines answer that have no mechanism but those that change answers, and that
    compute one request at a time."""
    own = [name for name in CHANGES_ANSWERS if name in mechanisms]
    run = Run(engine_with(own, kv_memory_bytes=64 * MIB))
    run.serve(requests_for(own), at_once=1)
    return run.outputs
