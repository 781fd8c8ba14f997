"""Loading of a :class:`PagedModel` from a transformers directory, with a choice of its pass.

Dense models with a fused pass are read straight from their files. All others, and models with
unusual files, are loaded by transformers' own modules (``module_loading``)::

    config ─ exact? ─► description ─┬─ usual files ─► skeleton ─► fused pass
                                    └─ else ─► transformers' modules ─► fused or module pass
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvell.attention.choice import kernels_for
from kvell.attention.interface import AttentionKernels
from kvell.attention.quantised import scale_bytes_of
from kvell.device.shared_weights import SharedWeights
from kvell.device.weight_cache import WeightCache
from kvell.device.weight_memory import WeightMemory
from kvell.models.config.budgets import budgets_of, with_budgets
from kvell.models.config.config_fields import optional_size, text_config
from kvell.models.config.description import ModelDescription, describe
from kvell.models.config.json_files import (
    CONFIG_FILE,
    DO_NOT_LOAD,
    FETCH_MODEL_AGAIN,
    read_by_library,
)
from kvell.models.config.quantization import require_quantization, unkept
from kvell.models.families.families import fused_class
from kvell.models.families.plain_config import known_config
from kvell.models.families.quantised_schemes import without_quantiser
from kvell.models.families.refusals import check_architecture
from kvell.models.forward.kv_memory import NO_KV
from kvell.models.fused.decoder import fused_decoder, takes
from kvell.models.fused.grouped import BlockWeight
from kvell.models.fused.skeleton import BODY, EMBEDDING, DecoderSkeleton, skeleton_of
from kvell.models.loading.gguf_weights import packaged_blocks
from kvell.models.loading.missing_head import (
    HEAD,
    blocks_with_head,
    lacks_head,
    tensors_with_head,
)
from kvell.models.loading.model_weights import weights_of
from kvell.models.loading.shared_loading import memory_for
from kvell.models.loading.weight_files import WeightMap
from kvell.models.paged_model import PagedModel
from kvell.models.text.early_tokenizer import wait_until_loaded

CPU = torch.device("cpu")


def load_paged_model(
    path: Path,
    kernels: AttentionKernels,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    kv_dtype: torch.dtype | None = None,
    kv_budget: str | None = None,
    fused: bool = True,
    quantization: str = "none",
    shared: SharedWeights | None = None,
    cache: WeightCache | None = None,
    overrides: str | None = None,
    is_dummy: bool = False,
) -> PagedModel:
    """Load a model's weights; its KV memory is attached later.

    :param fused: use the compiled pass, if the model has one; else transformers' own code.
    :param kv_budget: prompt tokens that layers keep (:func:`budgets.budgets_of`).
    :param is_dummy: make random weights from the config instead of reading files.
    :param shared: a file in which processes of this host have the weights once; no GPU uses it.
    :raises ChangeSomething: if the architecture is not known to be exact, files are missing or
        damaged, no layer can keep such a budget, or weights cannot be quantised this way.
    """
    require_quantization(quantization)
    config = known_config(path, overrides)
    check_architecture(config)
    description = describe_as(config, dtype, kv_dtype or dtype)
    if kv_budget is not None:
        layers = with_budgets(description.layers, budgets_of(description.layers, kv_budget))
        description = replace(description, layers=layers)
    kernels = kernels_for(kernels, vector_sizes(config, description), kv_dtype or dtype)
    place = device or CPU
    how = (description, kernels, kv_dtype, fused, quantization)
    weights = None if is_dummy else weights_of(path, config)
    config = without_quantiser(config)
    files = (path / CONFIG_FILE,) if weights is None else weights.sources
    form = (kernels, dtype, place, fused, quantization)
    with memory_for(shared, None if is_dummy else cache, files, config, *form) as memory:
        if weights is None:
            return _dummy_model(config, dtype, place, how, memory)
        has_head = not lacks_head(weights, config)
        blocks = blocks_with_head(weights, config)
        if quantization == "int4":
            blocks = blocks or packaged_blocks(weights)
        fits = fused and takes(kernels, place, dtype)
        skeleton = _skeleton(weights, config, dtype, blocks) if fits else None
        if skeleton is not None:
            with unkept(quantization):
                parts = (skeleton, description, kernels)
                decoder = fused_decoder(*parts, quantization, blocks, memory)
            if decoder is not None:
                parts_run = (*parts, kv_dtype, decoder)
                model = PagedModel(*parts_run, has_head=has_head, quantization=quantization)
                return _with_stored_form(model, weights, blocks)
        wait_until_loaded()
        from kvell.models.loading.module_loading import load_module, paged_module

        module = load_module(weights, config, dtype, place)
        model = paged_module(module, *how, blocks, memory, has_head=has_head)
        return _with_stored_form(model, weights, blocks)


def _with_stored_form(
    model: PagedModel, weights: WeightMap, blocks: Mapping[str, BlockWeight]
) -> PagedModel:
    """Note what weights in blocks of their files were read into; others stay as they are."""
    counts: dict[str, int] = defaultdict(int)
    for block in blocks.values() if model.fused else ():
        counts[block.form.name.lower()] += math.prod(block.shape)
    form = " and ".join(sorted(counts)) or str(model.dtype).removeprefix("torch.")
    model.stored_as = weights.stored_as(form)
    if model.stored_as and counts and model.quantization == "none":
        model.quantization = max(counts, key=counts.__getitem__)
    return model


How = tuple[ModelDescription, AttentionKernels, torch.dtype | None, bool, str]


def _dummy_model(
    config: Any, dtype: torch.dtype, place: torch.device, how: How, memory: WeightMemory
) -> PagedModel:
    from kvell.models.config.configs import whole_config
    from kvell.models.loading.module_loading import paged_module
    from kvell.models.loading.random_weights import DUMMY_SCALE, random_module

    module = random_module(whole_config(config), 0, dtype, DUMMY_SCALE).to(place)
    return paged_module(module, *how, memory=memory)


def _skeleton(
    weights: WeightMap, config: Any, dtype: torch.dtype, blocks: Mapping[str, BlockWeight]
) -> DecoderSkeleton | None:
    """Return the skeleton of a model with a fused pass; None if its files are unusual."""
    name = fused_class(config)
    # A body's names lack its prefix, and blocks are found by names: its numbers would be missing.
    own = weights.blocks()
    are_found = all(block == HEAD or block.startswith(BODY) for block in own)
    if name is None or not are_found:
        return None
    tensors = tensors_with_head(weights, config)
    embedding = tensors.get(EMBEDDING)
    if EMBEDDING in own and tensors.get(HEAD, embedding) is not embedding:
        tensors[EMBEDDING] = blocks[EMBEDDING].unpack(dtype)
    with read_by_library(weights.path, DO_NOT_LOAD, FETCH_MODEL_AGAIN):
        return skeleton_of(config, name, tensors, dtype)


def describe_as(config: Any, dtype: torch.dtype, kv_dtype: torch.dtype) -> ModelDescription:
    return describe(config, kv_dtype.itemsize, scale_bytes_of(kv_dtype), dtype.itemsize)


def vector_sizes(config: Any, description: ModelDescription) -> set[int]:
    stored = {layer.head_size for layer in description.layers if layer.kind not in NO_KV}
    text = text_config(config)
    return stored | {optional_size(text, (field,)) for field in ("kv_lora_rank", "v_head_dim")}


def check_model(path: Path, overrides: str | None = None) -> None:
    """Refuse, from its config alone, a model that cannot be served exactly.


    :raises ChangeSomething: if the architecture or a layer of it is not known to be exact.
    """
    config = known_config(path, overrides)
    check_architecture(config)
    describe(config, 2)
