from collections.abc import Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB
from tests.models.cases import long_unless
from tests.models.harness import tiny_module


def marked(
    cases: Sequence[tuple[str, bool]], fast: Sequence[tuple[str, bool]]
) -> list[ParameterSet]:
    """Architectures, and whether the compiled pass runs; those that are not fast are long."""
    return [
        pytest.param(
            architecture,
            is_fused,
            id=f"{architecture}-{'fused' if is_fused else 'modules'}",
            marks=long_unless((architecture, is_fused) in fast),
        )
        for architecture, is_fused in cases
    ]


CASES = [
    ("FalconH1ForCausalLM", True),
    ("Gemma3ForCausalLM", True),
    ("LlamaForCausalLM", True),
    ("FalconH1ForCausalLM", False),
    ("Gemma3ForCausalLM", False),
    ("LlamaForCausalLM", False),
    ("MiniCPM3ForCausalLM", False),
    ("Qwen3NextForCausalLM", False),
    ("Zamba2ForCausalLM", False),
]

FAST = CASES[:2] + CASES[5:7]

MARKED = marked(CASES, FAST)


def model_of(architecture: str, is_fused: bool) -> PagedModel:
    from tests.models.fused_models import fused_model, generic_model

    return (fused_model if is_fused else generic_model)(tiny_module(architecture))


def engine_of(
    architecture: str,
    is_fused: bool,
    kv_bytes: int = 8 * MIB,
    batched: int = 256,
    max_model_len: int = 256,
    **more: Any,
) -> Engine:
    options = EngineOptions(
        kv_memory_bytes=kv_bytes,
        max_model_len=max_model_len,
        max_num_batched_tokens=batched,
        **more,
    )
    return build_engine(model_of(architecture, is_fused), architecture, options)
