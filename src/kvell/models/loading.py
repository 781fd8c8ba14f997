"""A ready :class:`PagedModel` from a transformers directory or from a config alone."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kvell.attention.interface import AttentionKernels
from kvell.attention.quantised import scale_bytes_of
from kvell.models.budgets import budgets_of, with_budgets
from kvell.models.configs import read_config
from kvell.models.description import ModelDescription, architecture, describe, text_config
from kvell.models.families import OWN_TEXT, WITH_IMAGES, require_exact
from kvell.models.gguf_blocks import blocks_of
from kvell.models.lean.decoder import lean_decoder
from kvell.models.lean.grouped import GroupedWeight
from kvell.models.paged_model import PagedModel
from kvell.models.quantization import refusal, require_quantization
from kvell.models.random_weights import random_module
from kvell.models.refusals import class_run, needed, require_plain_weights
from kvell.models.small_linear import use_small_linears
from kvell.models.weights import load_module


def load_paged_model(
    path: Path,
    kernels: AttentionKernels,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    kv_dtype: torch.dtype | None = None,
    kv_budget: str | None = None,
    lean: bool = True,
    quantization: str = "none",
) -> PagedModel:
    """Load a model's weights; its KV memory is attached later.

    :param lean: run by the compiled pass, if the model has one; else by transformers' own code.
    :param quantization: one of ``quantization.QUANTIZATIONS``; only the compiled pass can.
    :param device: where weights go; the CPU if not given.
    :param kv_dtype: of stored keys and values; ``dtype`` if not given.
    :param kv_budget: tokens of a prompt that its layers keep (:func:`budgets.budgets_of`).
    :raises ChangeSomething: if the architecture is not known to be exact, files are missing
        or damaged, no layer can keep such a budget, or weights cannot be kept so.
    """
    require_quantization(quantization)
    config = read_config(path)
    check_architecture(config)
    description = describe_as(config, dtype, kv_dtype or dtype)
    if kv_budget is not None:
        layers = description.layers
        layers = with_budgets(layers, budgets_of(layers, kv_budget))
        description = replace(description, layers=layers)
    module = load_module(path, config, dtype, device or torch.device("cpu"))
    blocks = blocks_of(path) if quantization == "int4" else {}
    return _paged(module, description, kernels, kv_dtype, lean, quantization, blocks)


def _paged(
    module: Any,
    description: ModelDescription,
    kernels: AttentionKernels,
    kv_dtype: torch.dtype | None,
    lean: bool,
    quantization: str = "none",
    blocks: Mapping[str, GroupedWeight] = MappingProxyType({}),
) -> PagedModel:
    try:
        decoder = lean_decoder(module, description, kernels, quantization, blocks) if lean else None
    except ValueError as error:
        raise refusal(quantization, f"cannot keep the model's numbers ({error})") from error
    if decoder is None and quantization != "none":
        problem = "is for dense models on a CPU whose layers run in compiled code; this is none"
        raise refusal(quantization, problem)
    if decoder is None:
        use_small_linears(module)
    return PagedModel(module, description, kernels, kv_dtype, decoder)


def describe_as(config: Any, dtype: torch.dtype, kv_dtype: torch.dtype) -> ModelDescription:
    """What a model of the given dtype stores, keys and values in another."""
    return describe(config, kv_dtype.itemsize, scale_bytes_of(kv_dtype), dtype.itemsize)


def check_model(path: Path) -> None:
    """Refuse, from its config alone, a model that cannot be served exactly.

    :raises ChangeSomething: if the architecture or a layer of it is not known to be exact.
    """
    config = read_config(path)
    check_architecture(config)
    describe(config, 2)


def check_architecture(config: Any) -> None:
    """Make sure that the class transformers would run for a config is known to be exact.

    The class follows from the model type and the config's parts, whatever the config names.

    :raises ChangeSomething: naming the class and what it would need; also for weights that
        are quantised.
    """
    need = needed(config)
    if getattr(config, "architectures", None):
        require_exact(architecture(config), need)
    require_exact(class_run(config), need)
    if WITH_IMAGES.get(class_run(config), "cross") not in OWN_TEXT:
        require_exact(class_run(text_config(config)))
    require_plain_weights(config)


def random_paged_model(
    config: Any,
    kernels: AttentionKernels,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    scale: float | None = None,
    kv_dtype: torch.dtype | None = None,
    lean: bool = True,
) -> PagedModel:
    """A model with random weights from a config, untied and scaled until outputs vary.

    :param kv_dtype: of stored keys and values; ``dtype`` if not given.
    :param lean: as in :func:`load_paged_model`.
    :raises ChangeSomething: if the architecture is not known to be exact.
    """
    check_architecture(config)
    module = random_module(config, seed, dtype, scale).to(device or torch.device("cpu"))
    description = describe_as(module.config, dtype, kv_dtype or dtype)
    return _paged(module, description, kernels, kv_dtype, lean)
