"""Assembly of an engine from model, pool, memory core, runner and contract."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvell.attention.choice import choose_kernels
from kvell.clock import Clock, MonotonicClock
from kvell.cost.prices import DEFAULT_PRICES, InstancePrices
from kvell.device.available import give_back_freed
from kvell.device.host import CHUNK_BYTES
from kvell.device.shared_weights import SharedWeights
from kvell.device.weight_cache import WeightCache
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal
from kvell.engine.core.miss_watch import MissWatch
from kvell.engine.core.page_map import PageMap
from kvell.engine.engine import Engine
from kvell.engine.lending.distributed_request import full_groups
from kvell.engine.planning.scheduler import with_depth
from kvell.engine.protocol.statistics import ModelWeights
from kvell.engine.requests.limits import Limits, ModelRules
from kvell.engine.running.copies.copies_under_pass import copies_beside_passes
from kvell.engine.running.lent.queries import Queries
from kvell.engine.running.pool_link import PoolLink
from kvell.engine.running.recorded.starting import StartingModelRunner, record
from kvell.engine.running.runner import ModelRunner
from kvell.engine.sampling.controls import Controls
from kvell.engine.setup.budget_limits import observing_tokens
from kvell.engine.setup.contract import MemoryContract, make_contract, model_share
from kvell.engine.setup.engine_memory import (
    CpuBuffer,
    Memory,
    cpu_buffer_of,
    memory_of,
    pool_problem,
)
from kvell.engine.setup.model_limits import make_limits, rules_of
from kvell.engine.setup.objectives import check_objectives, watch_of
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.several_models import (
    ServedModel,
    check_several,
    images_of,
    with_draft,
)
from kvell.engine.setup.sizes import Sizes, sizes_of
from kvell.engine.setup.speculative_models import check_speculation
from kvell.errors import ChangeSomething
from kvell.memory import (
    VisibleCore,
    as_draft,
    create_core,
)
from kvell.mempool.agent import Agent
from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, stream_costs
from kvell.models.captured.graphs import Graphs
from kvell.models.config.kv_dtypes import kv_dtype_named
from kvell.models.images.image_store import ImageStore
from kvell.models.loading.loading import load_paged_model
from kvell.models.paged_model import PagedModel
from kvell.models.partials.served_layers import ServedLayers
from kvell.models.sources.progress import Progress

__all__ = ["DTYPES", "EngineOptions", "build_engine", "load_model", "make_limits"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = DTYPES | {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""The torch dtype of each name of ``--kv-cache-dtype``."""


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
    cache: WeightCache | None = None,
    threads: int | None = None,
    overrides: str | None = None,
    is_dummy: bool = False,
) -> PagedModel:
    """Load weights onto a device.

    :param kv_cache_dtype: one of ``kv_dtypes.KV_DTYPES``, or ``auto`` for the model's own.
    :param kv_budget: prompt tokens that layers keep (:func:`budgets.budgets_of`).
    :param enforce_eager: run transformers' code, even if the model has a fused pass.
    :param quantization: one of ``quantization.QUANTIZATIONS``, for models with a fused pass.
    :param weights_fd: descriptor of a memfd that holds the weights once for all processes of this
        host; not used on a GPU.
    :param cache: packed weights of earlier starts; not used on a GPU.
    :param overrides: a JSON object of fields that replace those of the model's config.
    :param is_dummy: make random weights from the config instead of reading files.
    :param threads: threads of the compiled pass; None: torch's number, and they rest while other
        programs need their processors.
    :raises ChangeSomething: for a missing device, a dtype that is not served, or a defect of the
        model's files.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ChangeSomething("--device", device, "has no GPU that torch can use", "use cpu")
    place = torch.device(device)
    progress("loading weights", 0.0)
    kv_dtype = STORED[kv_dtype_named(kv_cache_dtype, dtype)]
    model = load_paged_model(
        path,
        choose_kernels(place, num_threads=threads or 0),
        _dtype(dtype),
        place,
        kv_dtype,
        kv_budget,
        fused=not enforce_eager,
        quantization=quantization,
        shared=None if weights_fd is None else SharedWeights(weights_fd),
        cache=cache,
        overrides=overrides,
        is_dummy=is_dummy,
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
    prices: InstancePrices = DEFAULT_PRICES,
    graphs: Graphs | None = None,
) -> Engine:
    """Build an engine over a loaded model, with its pool attached.

    :param draft: the smaller draft model, whose groups share the pool.
    :param beside: further models, which share the pool and the steps.
    :param floor_bytes: size of the process before it loaded anything, for the contract.
    :param tokenizer_json: returns the first model's tokenizer, for grammars.
    :param graphs: record decode steps, and plan steps ahead unless ``options`` say otherwise; None:
        every step runs its Python.
    :raises ChangeSomething: if the KV memory cannot hold one request of max_model_len, the
        draft model does not suit ``model``, the models cannot be served together, or objectives
        would have no effect.
    """
    clock = clock or MonotonicClock()
    check_objectives(options)
    check_speculation(model, draft, options)
    first = ServedModel(name if beside else "", model, eos_token_ids, tokenizer_json)
    parts = _make_parts(name, (first, *beside), draft, options, prices, graphs)
    agent, staying = _make_agent(parts, incarnation)
    _attach_models(parts)
    controls = {served.name: served.controls() for served in parts.served}
    runner = _make_runner(parts, controls)
    link = _make_link(parts, agent)
    _let_ask(parts, runner, link)
    core = _make_core(parts, agent, incarnation)
    return Engine(
        core,
        runner,
        _make_contract(parts, floor_bytes),
        parts.sizes.need,
        journal=journal,
        incarnation=incarnation,
        images=parts.images,
        warmer=parts.memory.warmer,
        cold=parts.memory.chunks,
        objectives=watch_of(options, clock),
        clock=clock,
        grammars={name: control.grammars for name, control in controls.items()},
        page_map=PageMap(core, parts.core),
        link=link,
        staying=staying,
        prices=prices,
        weights=_model_weights(parts),
    )


@dataclass(frozen=True)
class _Parts:
    """Sizes, memory and limits of an engine, before anything runs."""

    name: str
    served: tuple[ServedModel, ...]
    draft: PagedModel | None
    options: EngineOptions
    sizes: Sizes
    rules: list[ModelRules]
    core: VisibleCore
    memory: Memory
    buffer: CpuBuffer | None
    limits: Limits
    steps: str
    graphs: Graphs | None

    @property
    def every(self) -> list[PagedModel]:
        return with_draft(self.served, self.draft)

    @property
    def images(self) -> ImageStore | None:
        """The images of the one model that takes images, or None."""
        return images_of(self.served)


def _make_parts(
    name: str,
    served: tuple[ServedModel, ...],
    draft: PagedModel | None,
    options: EngineOptions,
    prices: InstancePrices,
    graphs: Graphs | None,
) -> _Parts:
    """Check that the models can be served together, and give them a pool.

    A large page behind it is for pads of recorded steps.
    """
    check_several(served, options)
    first = served[0]
    every = with_draft(served, draft)
    layers = [layer for member in served for layer in member.layers()]
    if draft is not None:
        own = as_draft(draft.description.layers)
        layers += [replace(layer, model=first.name) for layer in own]
    sizes = sizes_of(every, layers, options)
    rules = rules_of(sizes, served, options, draft, layers)
    limits = replace(rules[0].limits, observing_tokens=observing_tokens(first.model, options))
    images = images_of(served)
    if images is not None:
        limits = replace(limits, whole_images=images.family.both_directions)
    core = create_core(sizes.layout, options.eviction)
    spare_bytes = 0 if graphs is None else sizes.layout.large_page_bytes
    memory = memory_of(sizes, core, every, options, spare_bytes)
    buffer = cpu_buffer_of(core, memory, every, options, limits, prices)
    limits, steps = with_depth(limits, options.async_scheduling, default=graphs is not None)
    parts = name, served, draft, options, sizes, rules, core, memory, buffer, limits, steps
    return _Parts(*parts, graphs)


def _make_agent(parts: _Parts, incarnation: int) -> tuple[Agent | None, str]:
    """Make the agent of an engine in a pool of several instances, if its requests can move.

    :returns: the agent, and the setting that keeps requests from moving; "" if they can move.
    :raises ChangeSomething: if requests must move and cannot.
    """
    place = parts.options.pool_place
    if place is None:
        return None, ""
    model = parts.served[0].model
    problem = pool_problem(model.device.type)
    if problem is not None and place.role != "mixed":
        raise problem
    if problem is not None:
        return None, problem.field
    names = [parts.name, *(served.name for served in parts.served[1:])]
    dtypes = [served.model.dtype for served in parts.served]
    stored = f"{' '.join(names)} {dtypes} {place.pool}"
    return Agent(parts.core, place.instance, incarnation, stored), ""


def _attach_models(parts: _Parts) -> None:
    layout, pool = parts.sizes.layout, parts.memory.read
    for served in parts.served:
        served.model.attach(layout.seen_by(served.name), pool)
    if parts.draft is not None:
        parts.draft.attach(layout.seen_by(parts.served[0].name, is_draft=True), pool)
    if parts.graphs is not None:
        models = {served.name: served.model for served in parts.served}
        record(parts.graphs, models, layout, pool, parts.limits)


def _make_runner(parts: _Parts, controls: dict[str, Controls]) -> ModelRunner:
    first, *beside = parts.served
    make = ModelRunner if parts.graphs is None else StartingModelRunner
    return make(
        first.model,
        parts.sizes.layout,
        parts.memory.read,
        parts.draft,
        first.name,
        {served.name: served.model for served in beside},
        parts.memory.slot_memory,
        None if parts.buffer is None else parts.buffer.memory,
        controls,
        copies_beside_passes(parts.options.copies_under_pass),
    )


def _make_core(parts: _Parts, agent: Agent | None, incarnation: int) -> EngineCore:
    place, buffer = parts.options.pool_place, parts.buffer
    return EngineCore(
        parts.core,
        parts.limits,
        parts.served[0].eos_token_ids,
        incarnation,
        parts.rules if len(parts.served) > 1 or not parts.rules[0].has_head else (),
        parts.memory.steps,
        None if buffer is None else buffer.swapping,
        None if buffer is None else buffer.parking,
        MissWatch(parts.core),
        agent,
        DEFAULT_PD_CACHING if place is None else place.pd_caching,
        stream_costs(place),
        None if buffer is None else buffer.first_large,
    )


def _make_link(parts: _Parts, agent: Agent | None) -> PoolLink | None:
    place, descriptor = parts.options.pool_place, parts.memory.descriptor
    if place is None or agent is None or descriptor is None:
        return None
    groups = parts.sizes.layout.groups
    pool = parts.memory.offered.numpy()
    layers = _answered_layers(parts)
    return PoolLink(place, agent, groups, pool, descriptor, parts.memory.neighbours, layers)


def _answered_layers(parts: _Parts) -> dict[int, ServedLayers]:
    layout, first = parts.sizes.layout, parts.served[0].name
    groups = [layout.indices_of(served.name) for served in parts.served]
    groups.append(layout.indices_of(first, is_draft=True))
    return {
        number: model.served_layers.in_groups(groups[number])
        for number, model in enumerate(parts.every)
        if model.served_layers is not None
    }


def _let_ask(parts: _Parts, runner: ModelRunner, link: PoolLink | None) -> None:
    """Let passes report and read to and from other instances, and request attention from creditors
    over pages that are not read in place."""
    if link is None:
        return
    runner.tells_written = link.written
    runner.stands = link.stands
    if not link.asks:
        return
    every = parts.every
    runner.queries = Queries(link.node.creditors.partials, len(every))
    for model, remote in zip(every, runner.queries.remote, strict=True):
        model.elsewhere = remote
    answered = {
        group for layers in _answered_layers(parts).values() for group in layers.full_groups
    }
    remote_groups = {
        served.name: {index for index, _ in full_groups(served.name, parts.sizes.layout.groups)}
        for served in parts.served
    }
    link.agent.asked_models = {name for name, groups in remote_groups.items() if groups <= answered}


def _make_contract(parts: _Parts, floor_bytes: int) -> MemoryContract:
    sizes, buffer = parts.sizes, parts.buffer
    shares = [
        model_share(rules.name, sizes.layout, rules.limits.max_model_len, sizes.fitting)
        for rules in parts.rules[1:]
    ]
    contract = make_contract(
        parts.name,
        sizes.layout,
        sizes.weights_bytes,
        sizes.reserve_bytes,
        parts.limits.max_model_len,
        tuple(shares),
        sizes.fitting,
    )
    return replace(
        contract,
        shared_bytes=sizes.shared_chunks * CHUNK_BYTES,
        floor_bytes=floor_bytes,
        cpu_buffer_bytes=buffer.memory.numel() if buffer else 0,
        grammar_bytes=sum(served.grammar_bytes() for served in parts.served),
        steps=parts.steps,
        dtype=str(parts.served[0].model.dtype).removeprefix("torch."),
        stored_as=tuple(filter(None, (served.model.stored_as for served in parts.served))),
    )


def _model_weights(parts: _Parts) -> dict[str, ModelWeights]:
    """Return the weights of every model by its name; those of the first are also its draft's."""
    weights = {}
    for index, served in enumerate(parts.served):
        model = served.model
        draft_bytes = parts.draft.weight_bytes if parts.draft is not None and not index else 0
        is_plain = model.quantization == "none"
        form = str(model.dtype).removeprefix("torch.") if is_plain else model.quantization
        key = served.name if index else ""
        weights[key] = ModelWeights(model.weight_bytes + draft_bytes, form, model.device.type)
    return weights


def _dtype(name: str) -> torch.dtype:
    """Return the dtype of a name; ``auto`` is bfloat16, the dtype that models are made for."""
    if name == "auto":
        return torch.bfloat16
    if name not in DTYPES:
        raise ChangeSomething("--dtype", name, "is not served", f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]
