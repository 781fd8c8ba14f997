"""Fused models over tiny modules, and the kernels that they may run on."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kvell.models.fused.grouped import BlockWeight
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import PagedModel
from tests.models.cases import some_fast
from tests.models.harness import tiny_module

native = pytest.importorskip("kvell.attention.native")
SETS: list[str] = native.instruction_sets()
MARKED_SETS = some_fast(SETS, (SETS[0], "portable"))
"""The best and the portable one are fast."""
every_set = pytest.mark.parametrize("instruction_set", MARKED_SETS)


def fused_model(
    module: Any,
    instruction_set: str | None = None,
    kv_dtype: torch.dtype | None = None,
    num_threads: int = 1,
    quantization: str = "none",
    blocks: Mapping[str, BlockWeight] | None = None,
) -> PagedModel:
    """Over a copy of the module, so that the original stays the oracle; fused, or it fails."""
    from kvell.models.fused.decoder import fused_decoder

    mine = copy.deepcopy(module)
    description = describe_as(mine.config, mine.dtype, kv_dtype or mine.dtype)
    kernels = native.NativeKernels(num_threads, instruction_set)
    decoder = fused_decoder(mine, description, kernels, quantization, blocks)
    assert decoder is not None
    return PagedModel(mine, description, kernels, kv_dtype, decoder)


def generic_model(
    module: Any,
    instruction_set: str | None = None,
    kv_dtype: torch.dtype | None = None,
    num_threads: int = 1,
) -> PagedModel:
    """The same by transformers' own code."""
    mine = copy.deepcopy(module)
    description = describe_as(mine.config, mine.dtype, kv_dtype or mine.dtype)
    kernels = native.NativeKernels(num_threads, instruction_set)
    return PagedModel(mine, description, kernels, kv_dtype)


def bf16_module(architecture: str) -> Any:
    return copy.deepcopy(tiny_module(architecture)).bfloat16()
