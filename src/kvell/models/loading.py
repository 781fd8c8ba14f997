"""A ready :class:`PagedModel` from a transformers directory or from a config alone."""

from pathlib import Path
from typing import Any

import torch

from kvell.attention.interface import AttentionKernels
from kvell.attention.quantised import scale_bytes_of
from kvell.models.configs import read_config
from kvell.models.description import ModelDescription, architecture, describe
from kvell.models.families import require_exact
from kvell.models.paged_model import PagedModel
from kvell.models.random_weights import random_module
from kvell.models.refusals import class_run, needed
from kvell.models.small_linear import use_small_linears
from kvell.models.weights import load_module


def load_paged_model(
    path: Path,
    kernels: AttentionKernels,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    kv_dtype: torch.dtype | None = None,
) -> PagedModel:
    """Load a model's weights; its KV memory is attached later.

    :param device: where weights go; the CPU if not given.
    :param kv_dtype: of stored keys and values; ``dtype`` if not given.
    :raises ChangeSomething: if the architecture is not known to be exact, or files are
        missing or damaged.
    """
    config = read_config(path)
    check_architecture(config)
    description = describe_as(config, dtype, kv_dtype or dtype)
    module = load_module(path, config, dtype, device or torch.device("cpu"))
    use_small_linears(module)
    return PagedModel(module, description, kernels, kv_dtype)


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

    :raises ChangeSomething: naming the class and what it would need.
    """
    need = needed(config)
    if getattr(config, "architectures", None):
        require_exact(architecture(config), need)
    require_exact(class_run(config), need)


def random_paged_model(
    config: Any,
    kernels: AttentionKernels,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    scale: float | None = None,
    kv_dtype: torch.dtype | None = None,
) -> PagedModel:
    """A model with random weights from a config, untied and scaled until outputs vary.

    :param kv_dtype: of stored keys and values; ``dtype`` if not given.
    :raises ChangeSomething: if the architecture is not known to be exact.
    """
    check_architecture(config)
    module = random_module(config, seed, dtype, scale).to(device or torch.device("cpu"))
    use_small_linears(module)
    description = describe_as(module.config, dtype, kv_dtype or dtype)
    return PagedModel(module, description, kernels, kv_dtype)
