"""Puts an engine together: model, pool, memory core, runner, contract."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvell.attention.choice import choose_kernels
from kvell.clock import Clock, MonotonicClock
from kvell.device.host import CHUNK_BYTES
from kvell.device.process_size import give_back_freed
from kvell.device.shared_weights import SharedWeights
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal
from kvell.engine.core.miss_watch import MissWatch
from kvell.engine.core.page_map import PageMap
from kvell.engine.engine import Engine
from kvell.engine.planning.overlap import chosen_depth
from kvell.engine.planning.whole_prompts import check_whole_prompts
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.model_rules import ModelRules
from kvell.engine.running.copies.copy_order import has_spare_processor
from kvell.engine.running.pool_link import PoolLink
from kvell.engine.running.runner import ModelRunner
from kvell.engine.setup.budget_limits import observing_tokens
from kvell.engine.setup.contract import make_contract, model_share
from kvell.engine.setup.engine_memory import cpu_buffer_of, memory_of
from kvell.engine.setup.objectives import check_objectives, watch_of
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.pool_place import pool_problem
from kvell.engine.setup.several_models import ServedModel, check_several
from kvell.engine.setup.sizes import PoolFlag, Sizes, flag_of, sizes_of
from kvell.engine.setup.speculative_models import check_speculation
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
from kvell.mempool.agent import Agent
from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, stream_costs
from kvell.models.config.kv_dtypes import kv_dtype_named
from kvell.models.loading.loading import load_paged_model
from kvell.models.paged_model import PagedModel
from kvell.models.sources.progress import Progress
from kvell.vocabulary import KIB

__all__ = ["DTYPES", "EngineOptions", "build_engine", "load_model", "make_limits"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = DTYPES | {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""The torch dtype of each name of ``--kv-cache-dtype``."""
MIN_MODEL_LEN = 2
"""A prompt of one token and one token of output."""


def load_model(
    path: Path,
    dtype: str,
    device: str,
    progress: Progress,
    kv_cache_dtype: str = "auto",
    kv_budget: str | None = None,
    enforce_eager: bool = False,
    quantization: str = "none",
    weights_fd: int | None = None,
) -> PagedModel:
    """Load weights onto a device.

    :param kv_cache_dtype: one of ``kv_dtypes.KV_DTYPES``, or ``auto`` for the model's own.
    :param kv_budget: tokens of a prompt that its layers keep (:func:`budgets.budgets_of`).
    :param enforce_eager: run transformers' own code, even if the model has a fused pass.
    :param quantization: one of ``quantization.QUANTIZATIONS``, for models with a fused pass.
    :param weights_fd: descriptor of a memfd in which processes of this host have the weights once;
        not used on a GPU.
    :raises ChangeSomething: for a missing device, a dtype that is not served, or anything wrong
        with the model's files.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ChangeSomething("--device", device, "has no GPU that torch can use", "use cpu")
    place = torch.device(device)
    progress("loading weights", 0.0)
    kv_dtype = STORED[kv_dtype_named(kv_cache_dtype, dtype)]
    model = load_paged_model(
        path,
        choose_kernels(place),
        _dtype(dtype),
        place,
        kv_dtype,
        kv_budget,
        fused=not enforce_eager,
        quantization=quantization,
        shared=None if weights_fd is None else SharedWeights(weights_fd),
    )
    give_back_freed()
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
    beside: Sequence[ServedModel] = (),
    floor_bytes: int = 0,
    clock: Clock | None = None,
    tokenizer_json: Callable[[], str] | None = None,
) -> Engine:
    """Build an engine over a loaded model, with its pool attached.

    :param draft: its draft model, which is smaller; its groups lie in the same pool.
    :param beside: further models, independent of it, that share its pool and its steps.
    :param floor_bytes: of the process before it loaded anything, for the contract.
    :param clock: times requests and their lateness; the machine's own if not given.
    :param tokenizer_json: gives the first model's tokenizer, for grammars that answers follow.
    :raises ChangeSomething: if the KV memory cannot hold one request of max_model_len, the
        draft model does not suit this one, models cannot be served side by side, or objectives
        could have no effect.
    """
    clock = clock or MonotonicClock()
    check_objectives(options)
    check_speculation(model, draft, options)
    first = ServedModel(name if beside else "", model, eos_token_ids, tokenizer_json)
    served = (first, *beside)
    check_several(served, options, draft is not None)
    models = [one.model for one in served]
    every = [*models, *([draft] if draft else [])]
    layers = [layer for one in served for layer in one.layers()]
    layers += as_draft(draft.description.layers) if draft else ()
    sizes = sizes_of(every, layers, options, has_draft=draft is not None)
    layout = sizes.layout
    rules = _rules(sizes, served, options, draft, layers)
    limits = replace(rules[0].limits, observing_tokens=observing_tokens(model, options))
    if model.images is not None:
        limits = replace(limits, whole_images=model.images.family.both_directions)
    core = create_core(layout)
    memory = memory_of(sizes, core, every, options)
    buffer = cpu_buffer_of(core, every, options, limits)
    limits, steps = chosen_depth(
        limits,
        layout,
        wanted=options.async_scheduling,
        shares_pool=memory.steps is not None,
        swaps=buffer is not None,
    )
    agent, staying = None, ""
    if options.pool_place is not None:
        problem = pool_problem(
            device=model.device.type,
            shares_memory=memory.descriptor is None,
            has_buffer=buffer is not None,
            has_drafts=bool(options.num_speculative_tokens),
            plans_ahead=bool(limits.depth),
            models=len(served),
        )
        if problem is not None and options.pool_place.role != "mixed":
            raise problem
        staying = "" if problem is None else problem.field
        if problem is None:
            stored = f"{name} {model.dtype} {options.pool_place.pool}"
            agent = Agent(core, options.pool_place.instance, incarnation, stored)
    for one in served:
        one.model.attach(layout.seen_by(one.name), memory.pool)
    if draft is not None:
        draft.attach(layout.seen_by(is_draft=True), memory.pool)
    shares = [
        model_share(one.name, layout, one.limits.max_model_len, sizes.fitting) for one in rules[1:]
    ]
    others = {one.name: one.model for one in beside}
    slots = SlotTable(layout.num_large_pages)
    controls = {one.name: one.controls() for one in served}
    runner = ModelRunner(
        model,
        layout,
        slots,
        memory.pool,
        draft,
        served[0].name,
        others,
        memory.lends,
        None if buffer is None else buffer.memory,
        controls,
        copies_beside_passes(options),
    )
    engine_core = EngineCore(
        core,
        limits,
        eos_token_ids,
        incarnation,
        rules if beside else (),
        memory.steps,
        None if buffer is None else buffer.swapping,
        None if buffer is None else buffer.parking,
        MissWatch(core),
        agent,
        DEFAULT_PD_CACHING if options.pool_place is None else options.pool_place.pd_caching,
        stream_costs(options.pool_place),
    )
    link = None
    if options.pool_place is not None and agent is not None and memory.descriptor is not None:
        pool, descriptor = memory.pool.numpy(), memory.descriptor
        link = PoolLink(options.pool_place, agent, layout.groups, pool, descriptor)
        runner.tells_written = link.written
    return Engine(
        engine_core,
        runner,
        make_contract(
            name,
            layout,
            sizes.weights_bytes,
            sizes.reserve_bytes,
            limits.max_model_len,
            tuple(shares),
            shared_bytes=sizes.shared_chunks * CHUNK_BYTES,
            floor_bytes=floor_bytes,
            cpu_buffer_bytes=buffer.memory.numel() if buffer else 0,
            grammar_bytes=sum(one.grammar_bytes() for one in served),
            fitting=sizes.fitting,
            steps=steps,
        ),
        sizes.need,
        journal=journal,
        incarnation=incarnation,
        images=model.images,
        warmer=memory.warmer,
        cold=memory.chunks,
        objectives=watch_of(options, clock),
        clock=clock,
        grammars={one.name: controls[one.name].grammars for one in served},
        page_map=PageMap(engine_core, core),
        link=link,
        staying=staying,
    )


def copies_beside_passes(options: EngineOptions) -> bool:
    """Whether pages are copied to the CPU buffer and back beside passes, where they can be."""
    if options.copies_under_pass is not None:
        return options.copies_under_pass
    return has_spare_processor(len(os.sched_getaffinity(0)), torch.get_num_threads())


def _rules(
    sizes: Sizes,
    served: Sequence[ServedModel],
    options: EngineOptions,
    draft: PagedModel | None,
    layers: Sequence[LayerSpec],
) -> list[ModelRules]:
    """The rules of each model; a given ``max_model_len`` is the first's, and a cap for others."""
    found, layout = [], sizes.promised
    flag = flag_of(sizes, options)
    for index, (name, model, eos) in enumerate((s.name, s.model, s.eos_token_ids) for s in served):
        own, given = model.description.max_model_len, options.max_model_len
        wish = min(own, given) if index and given is not None else given
        wished = replace(options, max_model_len=wish)
        limits = make_limits(layout, model, wished, draft, name, layers, flag)
        found.append(ModelRules(name, limits, eos, layout.seen_by(name) if name else layout))
    return found


def make_limits(
    layout: Layout,
    model: PagedModel,
    options: EngineOptions,
    draft: PagedModel | None = None,
    name: str = "",
    layers: Sequence[LayerSpec] | None = None,
    flag: PoolFlag | None = None,
) -> Limits:
    """The constants of a run; ``max_model_len`` follows from the pool unless it is given.

    :param name: which of the pool's models it is, if there are several.
    :param layers: all layers in the pool; the model's own and its draft's if not given.
    :param flag: what to change if the pool is too small; ``--kv-memory`` if not given.
    :raises ChangeSomething: if a given ``max_model_len`` is not possible.
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
    chunk_tokens, most = Limits().min_chunk_tokens, options.max_num_batched_tokens
    if not options.enable_chunked_prefill:
        check_whole_prompts(most, options.max_model_len or 0)
        wanted, chunk_tokens = min(wanted, most), most
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
        min_chunk_tokens=chunk_tokens,
        enable_chunked_prefill=options.enable_chunked_prefill,
    )
    seen = layout.seen_by(name) if name else layout
    fits = longest_request(seen, wanted, limits.min_chunk_tokens)
    if fits < (wanted if options.max_model_len else MIN_MODEL_LEN):
        if layers is None:
            layers = (
                *model.description.layers,
                *(as_draft(draft.description.layers) if draft else ()),
            )
        flag = flag or PoolFlag("--kv-memory", layout.pool_bytes)
        enough_bytes = _enough_bytes(seen, layers, options.manager, limits, name)
        need_kib = -(-(enough_bytes + flag.beside_bytes) // KIB)
        raise ChangeSomething(
            flag.name,
            f"{flag.value_bytes // KIB}KiB",
            f"is too small for one request of --max-model-len={wanted}"
            + f" to {name}" * bool(name),
            f"use {flag.name} {need_kib}KiB"
            + (f" or --max-model-len {fits}" if fits >= MIN_MODEL_LEN else ""),
        )
    return Limits(**{**vars(limits), "max_model_len": fits})


def _enough_bytes(
    layout: Layout, layers: Sequence[LayerSpec], manager: Manager, limits: Limits, name: str
) -> int:
    """Bytes of a pool that fits one request of ``max_model_len``.

    A larger pool may have larger pages, so the layout is planned again until it fits.
    """
    wanted = limits.max_model_len
    chunk = min(wanted, limits.min_chunk_tokens)
    enough_bytes = pool_bytes_for(layout, wanted, chunk)
    while True:
        layout = plan_layout(layers, enough_bytes, manager=manager)
        layout = layout.seen_by(name) if name else layout
        need_bytes = pool_bytes_for(layout, wanted, chunk)
        if need_bytes <= layout.pool_bytes:
            return enough_bytes
        enough_bytes = max(need_bytes, enough_bytes + layout.large_page_bytes)


def _dtype(name: str) -> torch.dtype:
    """A dtype by name; ``auto`` is bfloat16, for which models are made."""
    if name == "auto":
        return torch.bfloat16
    if name not in DTYPES:
        raise ChangeSomething("--dtype", name, "is not served", f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]
