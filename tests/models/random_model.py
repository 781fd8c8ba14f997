"""Models with random weights from a config alone, in memory."""

from typing import Any

import torch

from kvell.attention.interface import AttentionKernels
from kvell.models.families.refusals import check_architecture
from kvell.models.loading.loading import describe_as
from kvell.models.loading.module_loading import paged_module
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import PagedModel


def random_paged_model(
    config: Any,
    kernels: AttentionKernels,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    scale: float | None = None,
    kv_dtype: torch.dtype | None = None,
    fused: bool = True,
) -> PagedModel:
    """Make a model with random weights from a config, untied and scaled until outputs vary.

    :raises ChangeSomething: if the architecture is not known to be exact.
    """
    check_architecture(config)
    module = random_module(config, seed, dtype, scale).to(device or torch.device("cpu"))
    description = describe_as(module.config, dtype, kv_dtype or dtype)
    return paged_module(module, description, kernels, kv_dtype, fused)
