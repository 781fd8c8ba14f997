"""Real engines over tiny models with any set of mechanisms, connected in a pool."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.moving.handovers import Handovers
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.several_models import ServedModel
from kvell.memory import GroupKind
from kvell.mempool.rendezvous import FolderRendezvous, PageTransport, PdCaching, make_folder
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB
from tests.models.fused_models import fused_model
from tests.models.harness import prompt_ids, tiny_config
from tests.models.serving.lending import SECTION_TOKENS, Lending

Mechanisms = tuple[str, ...]
"""What an engine has besides its pool."""
ALONE: tuple[Mechanisms, ...] = (
    *(("draft",), ("async",), ("two models",), ("buffer",), ("memory",), ("hybrid",), ("int8",)),
    *(("draft", "buffer", "memory"), ("two models", "buffer", "memory")),
)
PAIRS: tuple[Mechanisms, ...] = (
    *(("draft", "buffer"), ("draft", "memory"), ("buffer", "memory")),
    *(("two models", "buffer"), ("two models", "memory"), ("two models", "async")),
)
CHANGES_ANSWERS = ("two models", "hybrid", "int8")
"""Mechanisms without which answers are different ones."""
ARCHITECTURE = "LlamaForCausalLM"
HYBRID = "FalconH1ForCausalLM"
SECOND = "Gemma3ForCausalLM"
MAX_MODEL_LEN = 256
LONGEST = 1200
"""The context where sections have 512 tokens."""
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
LONG = prompt_ids(130)
PROMPTS = {f"q{length}": prompt_ids(length) for length in (3, 90, 1, 64)}


def model_of(architecture: str, kv_dtype: torch.dtype | None = None) -> PagedModel:
    config = tiny_config(architecture, max_position_embeddings=2048)
    return fused_model(random_module(config, 3), kv_dtype=kv_dtype)


def engine_with(mechanisms: Sequence[str], second: str = SECOND, **more: Any) -> Engine:
    """Build an engine whose answers are those of an engine without its mechanisms.

    :param second: architecture of the second of two models.
    """
    options: dict[str, Any] = {
        "kv_memory_bytes": 8 * MIB,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 256,
        "async_scheduling": "async" in mechanisms,
        "cpu_buffer_bytes": 4 * MIB if "buffer" in mechanisms else None,
        "num_speculative_tokens": 3 if "draft" in mechanisms else 0,
    }
    draft = model_of(ARCHITECTURE) if "draft" in mechanisms else None
    beside = [ServedModel("m1", model_of(second))] if "two models" in mechanisms else []
    if "memory" in mechanisms:
        options |= {"memory_bytes": 24 * MIB, "kv_memory_bytes": None}
    first = HYBRID if "hybrid" in mechanisms else ARCHITECTURE
    return build_engine(
        model_of(first, torch.int8 if "int8" in mechanisms else None),
        "m0",
        EngineOptions(**options | more),
        draft=draft,
        beside=beside,
    )


def check_mechanisms(engine: Engine, mechanisms: Sequence[str]) -> None:
    core = engine.core
    assert (core.limits.depth == 1) == ("async" in mechanisms)
    assert isinstance(core.scheduler.chunks.memory, SharedMemory) == ("memory" in mechanisms)
    assert (core.scheduler.swapping is not None) == ("buffer" in mechanisms)
    assert any(group.is_draft for group in core.memory.layout.groups) == ("draft" in mechanisms)
    kinds = {group.kind for group in core.memory.layout.groups}
    assert (GroupKind.STATE in kinds) == ("hybrid" in mechanisms)
    models = {group.model for group in core.memory.layout.groups}
    assert (len(models) > 1) == ("two models" in mechanisms)


@contextmanager
def pool_of(
    mechanisms: Sequence[str],
    folder: Path,
    names: str = "abc",
    transport: PageTransport = "memory",
    pd_caching: PdCaching = 3,
    section_tokens: int = SECTION_TOKENS,
    **more: Any,
) -> Iterator[Lending]:
    """Yield engines that move requests and lend each other sections of few tokens."""
    make_folder(folder)
    engines = [
        engine_with(
            mechanisms,
            pool_place=FolderRendezvous(name, folder, pd_caching=pd_caching, transport=transport),
            max_model_len=LONGEST if section_tokens > SECTION_TOKENS else MAX_MODEL_LEN,
            **more,
        )
        for name in names
    ]
    for engine in engines:
        check_mechanisms(engine, mechanisms)
        assert isinstance(engine.core.pool, Handovers), "its requests cannot move"
        engine.core.pool.borrowed.section_tokens = section_tokens
    try:
        yield Lending(engines)
    finally:
        for engine in engines:
            engine.close()
