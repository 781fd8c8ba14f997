"""Construction of a :class:`PagedModel` from transformers' own modules, with their best pass."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from kvell.attention.interface import AttentionKernels
from kvell.device.weight_memory import PrivateWeights, WeightMemory
from kvell.models.config.description import ModelDescription
from kvell.models.config.quantization import refusal, unkept
from kvell.models.forward.small_linear import use_small_linears
from kvell.models.fused.decoder import fused_decoder
from kvell.models.fused.grouped import BlockWeight
from kvell.models.loading.shared_loading import share_parameters
from kvell.models.loading.weights import load_module
from kvell.models.paged_model import PagedModel

__all__ = ["load_module", "paged_module"]


def paged_module(
    module: Any,
    description: ModelDescription,
    kernels: AttentionKernels,
    kv_dtype: torch.dtype | None,
    fused: bool,
    quantization: str = "none",
    blocks: Mapping[str, BlockWeight] = MappingProxyType({}),
    memory: WeightMemory | None = None,
    has_head: bool = True,
) -> PagedModel:
    """Take over a module.

    :param fused: use the compiled pass, if the model has one; else transformers' own code.
    :param blocks: weights by the names of the module's parameters, kept in their form.
    :raises ChangeSomething: if weights cannot be stored in the ``quantization``.
    """
    memory = memory or PrivateWeights()
    with unkept(quantization):
        decoder = (
            fused_decoder(module, description, kernels, quantization, blocks, memory)
            if fused
            else None
        )
    if decoder is None and quantization != "none":
        problem = "needs a dense model on a CPU that runs in compiled code; this is not one"
        raise refusal(quantization, problem)
    if decoder is None:
        share_parameters(module, memory)
        use_small_linears(module)
    parts = module, description, kernels, kv_dtype, decoder
    return PagedModel(*parts, has_head=has_head, quantization=quantization)
