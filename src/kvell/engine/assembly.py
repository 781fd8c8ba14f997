"""Puts an engine together: model, pool, memory core, runner, contract."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvell.attention.choice import choose_kernels
from kvell.device.available import available_bytes, default_kv_memory_bytes
from kvell.device.host import HostPool
from kvell.elastic.arena import ActivationModel
from kvell.engine.budget_limits import observing_tokens
from kvell.engine.contract import make_contract
from kvell.engine.core import EngineCore
from kvell.engine.engine import Engine
from kvell.engine.journal import Journal
from kvell.engine.limits import Limits
from kvell.engine.options import EngineOptions
from kvell.engine.runner import ModelRunner
from kvell.engine.speculative_models import check_speculation
from kvell.errors import ChangeSomething
from kvell.memory import (
    LayerSpec,
    Layout,
    Manager,
    SlotTable,
    as_draft,
    create_core,
    longest_request,
    plan_layout,
    pool_bytes_for,
)
from kvell.models.activations import activation_model
from kvell.models.kv_dtypes import kv_dtype_named
from kvell.models.kv_memory import pool_tensor
from kvell.models.loading import load_paged_model
from kvell.models.paged_model import PagedModel
from kvell.models.progress import Progress
from kvell.vocabulary import KIB

__all__ = ["DTYPES", "EngineOptions", "build_engine", "load_model", "make_limits"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = DTYPES | {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""What each name of ``--kv-cache-dtype`` means to torch."""
GPU_KV_SHARE = 0.9
"""Part of a GPU's free memory, after weights and reserve, that becomes the KV pool."""
MIN_MODEL_LEN = 2
"""A prompt of one token and one token of output."""


def load_model(
    path: Path,
    dtype: str,
    device: str,
    progress: Progress,
    kv_cache_dtype: str = "auto",
    kv_budget: str | None = None,
) -> PagedModel:
    """Load weights onto a device.

    :param kv_cache_dtype: one of ``kv_dtypes.KV_DTYPES``, or ``auto`` for the model's own.
    :param kv_budget: tokens of a prompt that its layers keep (:func:`budgets.budgets_of`).
    :raises ChangeSomething: for a device that is not there, a dtype that is not
        served, or whatever is wrong with the model's files.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ChangeSomething("--device", device, "has no GPU that torch can use", "use cpu")
    place = torch.device(device)
    progress("loading weights", 0.0)
    kv_dtype = STORED[kv_dtype_named(kv_cache_dtype, dtype)]
    model = load_paged_model(path, choose_kernels(place), _dtype(dtype), place, kv_dtype, kv_budget)
    progress("loading weights", 1.0)
    return model


def build_engine(
    model: PagedModel,
    name: str,
    options: EngineOptions,
    eos_token_ids: frozenset[int] = frozenset(),
    journal: Journal | None = None,
    incarnation: int = 0,
    draft: PagedModel | None = None,
) -> Engine:
    """An engine over a loaded model, its pool attached.

    :param draft: a smaller model that guesses for it; its groups lie in the same pool.
    :raises ChangeSomething: if the KV memory cannot hold one request of max_model_len, or the
        draft model cannot guess for this one.
    """
    check_speculation(model, draft, options)
    activations = _activations(model, draft)
    reserve_bytes = activations.need_bytes(options.max_num_batched_tokens, options.max_step_logits)
    kv_bytes = options.kv_memory_bytes or _default_kv_bytes(model.device, reserve_bytes)
    layout = _layout(_layers(model, draft), kv_bytes, options)
    limits = make_limits(layout, model, options, draft)
    limits = replace(limits, observing_tokens=observing_tokens(model, options))
    if model.images is not None:
        limits = replace(limits, whole_images=model.images.family.both_directions)
    buffer = HostPool(layout.pool_bytes).buffer() if model.device.type == "cpu" else None
    pool = pool_tensor(buffer, layout.pool_bytes, model.device)
    model.attach(layout.seen_by(), pool)
    if draft is not None:
        draft.attach(layout.seen_by(is_draft=True), pool)
    weight_bytes = model.weight_bytes + (draft.weight_bytes if draft else 0)
    return Engine(
        EngineCore(create_core(layout), limits, eos_token_ids, incarnation),
        ModelRunner(model, layout, SlotTable(layout.num_large_pages), pool, draft),
        make_contract(name, layout, weight_bytes, reserve_bytes, limits.max_model_len),
        activations,
        journal=journal,
        incarnation=incarnation,
        images=model.images,
    )


def _layout(layers: Sequence[LayerSpec], kv_bytes: int, options: EngineOptions) -> Layout:
    """Embeddings wait in pages of their own where no token's keys and values have room for one."""
    try:
        return plan_layout(layers, kv_bytes, manager=options.manager, embeddings=options.embeddings)
    except ChangeSomething as problem:
        if problem.field != "embeddings":
            raise
    return plan_layout(layers, kv_bytes, manager=options.manager)


def make_limits(
    layout: Layout, model: PagedModel, options: EngineOptions, draft: PagedModel | None = None
) -> Limits:
    """The constants of a run; ``max_model_len`` from the pool unless it is given.

    :raises ChangeSomething: if a given ``max_model_len`` cannot be had.
    """
    own = min(one.description.max_model_len for one in (model, draft) if one is not None)
    if options.max_model_len is not None and options.max_model_len > own:
        raise ChangeSomething(
            "--max-model-len",
            options.max_model_len,
            f"is above the own limit of the model, or of its draft model: {own} tokens"
            if draft
            else f"is above the model's own limit of {own} tokens",
            f"use at most {own}",
        )
    wanted = options.max_model_len or own
    limits = Limits(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=wanted,
        vocab_size=model.description.vocab_size,
        common_pool=options.common_pool,
        num_speculative_tokens=options.num_speculative_tokens,
        has_drafter=draft is not None,
        prompt_lookup_max=options.prompt_lookup_max,
        prompt_lookup_min=options.prompt_lookup_min,
    )
    fits = longest_request(layout, wanted, limits.min_chunk_tokens)
    if fits < (wanted if options.max_model_len else MIN_MODEL_LEN):
        need_kib = -(-_enough_bytes(layout, _layers(model, draft), options.manager, limits) // KIB)
        raise ChangeSomething(
            "--kv-memory",
            f"{layout.pool_bytes // KIB}KiB",
            f"is too small for one request of --max-model-len={wanted}",
            f"use --kv-memory {need_kib}KiB"
            + (f" or --max-model-len {fits}" if fits >= MIN_MODEL_LEN else ""),
        )
    return Limits(**{**vars(limits), "max_model_len": fits})


def _enough_bytes(
    layout: Layout, layers: Sequence[LayerSpec], manager: Manager, limits: Limits
) -> int:
    """A pool for one request of ``max_model_len``: a larger pool may have larger pages."""
    wanted, chunk = limits.max_model_len, limits.min_chunk_tokens
    enough_bytes = pool_bytes_for(layout, wanted, chunk)
    while True:
        layout = plan_layout(layers, enough_bytes, manager=manager)
        need_bytes = pool_bytes_for(layout, wanted, chunk)
        if need_bytes <= layout.pool_bytes:
            return enough_bytes
        enough_bytes = max(need_bytes, enough_bytes + layout.large_page_bytes)


def _layers(model: PagedModel, draft: PagedModel | None) -> Sequence[LayerSpec]:
    """Everything that is stored in the pool."""
    own = model.description.layers
    return own if draft is None else (*own, *as_draft(draft.description.layers))


def _activations(model: PagedModel, draft: PagedModel | None) -> ActivationModel:
    """Of a step: the models take turns, so the larger need is both's."""
    needs = [activation_model(one.module.config) for one in (model, draft) if one is not None]
    return ActivationModel(
        max(need.fixed_bytes for need in needs),
        max(need.token_bytes for need in needs),
        max(need.logits_row_bytes for need in needs),
    )


def _dtype(name: str) -> torch.dtype:
    """A named dtype; ``auto`` is bfloat16, which is what models are made for."""
    if name == "auto":
        return torch.bfloat16
    if name not in DTYPES:
        raise ChangeSomething("--dtype", name, "is not served", f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _default_kv_bytes(device: torch.device, reserve_bytes: int) -> int:
    """A quarter of what is available on a CPU; most of what is left on a GPU."""
    if device.type != "cuda":
        return default_kv_memory_bytes(available_bytes())
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int((free_bytes - reserve_bytes) * GPU_KV_SHARE)
