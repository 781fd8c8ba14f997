"""Puts an engine together: model, pool, memory core, runner, contract."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kvell.attention.choice import choose_kernels
from kvell.device.available import available_bytes, default_kv_memory_bytes
from kvell.device.host import HostPool
from kvell.engine.contract import make_contract
from kvell.engine.core import EngineCore
from kvell.engine.engine import Engine
from kvell.engine.journal import Journal
from kvell.engine.limits import Limits, max_step_guesses
from kvell.engine.runner import ModelRunner
from kvell.errors import ChangeSomething
from kvell.memory import (
    Layout,
    Manager,
    SlotTable,
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

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = DTYPES | {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""What each name of ``--kv-cache-dtype`` means to torch."""
GPU_KV_SHARE = 0.9
"""Part of a GPU's free memory, after weights and reserve, that becomes the KV pool."""
MIN_MODEL_LEN = 2
"""A prompt of one token and one token of output."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made with; the names are the flags'."""

    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    manager: Manager = "kvell"
    common_pool: bool = False
    num_speculative_tokens: int = 0
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2

    @property
    def max_step_logits(self) -> int:
        """Rows of logits that a step has at most."""
        return self.max_num_seqs + max_step_guesses(self.max_num_seqs, self.num_speculative_tokens)


def load_model(
    path: Path, dtype: str, device: str, progress: Progress, kv_cache_dtype: str = "auto"
) -> PagedModel:
    """Load weights onto a device.

    :param kv_cache_dtype: one of ``kv_dtypes.KV_DTYPES``, or ``auto`` for the model's own.
    :raises ChangeSomething: for a device that is not there, a dtype that is not
        served, or whatever is wrong with the model's files.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ChangeSomething("--device", device, "has no GPU that torch can use", "use cpu")
    place = torch.device(device)
    progress("loading weights", 0.0)
    kv_dtype = STORED[kv_dtype_named(kv_cache_dtype, dtype)]
    model = load_paged_model(path, choose_kernels(place), _dtype(dtype), place, kv_dtype)
    progress("loading weights", 1.0)
    return model


def build_engine(
    model: PagedModel,
    name: str,
    options: EngineOptions,
    eos_token_ids: frozenset[int] = frozenset(),
    journal: Journal | None = None,
    incarnation: int = 0,
) -> Engine:
    """An engine over a loaded model, its pool attached.

    :raises ChangeSomething: if the KV memory cannot hold one request of max_model_len.
    """
    activations = activation_model(model.module.config)
    reserve_bytes = activations.need_bytes(options.max_num_batched_tokens, options.max_step_logits)
    kv_bytes = options.kv_memory_bytes or _default_kv_bytes(model.device, reserve_bytes)
    layout = plan_layout(model.description.layers, kv_bytes, manager=options.manager)
    limits = make_limits(layout, model, options)
    buffer = HostPool(layout.pool_bytes).buffer() if model.device.type == "cpu" else None
    pool = pool_tensor(buffer, layout.pool_bytes, model.device)
    model.attach(layout, pool)
    return Engine(
        EngineCore(create_core(layout), limits, eos_token_ids, incarnation),
        ModelRunner(model, layout, SlotTable(layout.num_large_pages), pool),
        make_contract(name, layout, model.weight_bytes, reserve_bytes, limits.max_model_len),
        activations,
        journal=journal,
        incarnation=incarnation,
    )


def make_limits(layout: Layout, model: PagedModel, options: EngineOptions) -> Limits:
    """The constants of a run; ``max_model_len`` from the pool unless it is given.

    :raises ChangeSomething: if a given ``max_model_len`` cannot be had, or lengths to look up
        contradict each other.
    """
    own = model.description.max_model_len
    if options.max_model_len is not None and options.max_model_len > own:
        raise ChangeSomething(
            "--max-model-len",
            options.max_model_len,
            f"is above the model's own limit of {own} tokens",
            f"use at most {own}",
        )
    _check_lookup(options)
    wanted = options.max_model_len or own
    limits = Limits(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=wanted,
        vocab_size=model.description.vocab_size,
        common_pool=options.common_pool,
        num_speculative_tokens=options.num_speculative_tokens,
        prompt_lookup_max=options.prompt_lookup_max,
        prompt_lookup_min=options.prompt_lookup_min,
    )
    fits = longest_request(layout, wanted, limits.min_chunk_tokens)
    if fits < (wanted if options.max_model_len else MIN_MODEL_LEN):
        need_kib = -(-_enough_bytes(layout, model, options.manager, limits) // KIB)
        raise ChangeSomething(
            "--kv-memory",
            f"{layout.pool_bytes // KIB}KiB",
            f"is too small for one request of --max-model-len={wanted}",
            f"use --kv-memory {need_kib}KiB"
            + (f" or --max-model-len {fits}" if fits >= MIN_MODEL_LEN else ""),
        )
    return Limits(**{**vars(limits), "max_model_len": fits})


def _check_lookup(options: EngineOptions) -> None:
    if options.num_speculative_tokens < 0:
        raise ChangeSomething(
            "--num-speculative-tokens",
            options.num_speculative_tokens,
            "is below 0",
            "use 0 to guess nothing",
        )
    shortest, longest = options.prompt_lookup_min, options.prompt_lookup_max
    if not 1 <= shortest <= longest:
        raise ChangeSomething(
            "--prompt-lookup-min",
            shortest,
            f"is not between 1 and --prompt-lookup-max={longest}",
            f"use at most {max(1, longest)}",
        )


def _enough_bytes(layout: Layout, model: PagedModel, manager: Manager, limits: Limits) -> int:
    """A pool for one request of ``max_model_len``: a larger pool may have larger pages."""
    wanted, chunk = limits.max_model_len, limits.min_chunk_tokens
    enough_bytes = pool_bytes_for(layout, wanted, chunk)
    while True:
        layout = plan_layout(model.description.layers, enough_bytes, manager=manager)
        need_bytes = pool_bytes_for(layout, wanted, chunk)
        if need_bytes <= layout.pool_bytes:
            return enough_bytes
        enough_bytes = max(need_bytes, enough_bytes + layout.large_page_bytes)


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
