"""Limits of the requests that each model of an engine can serve in its pool."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvell.byte_sizes import typed_bytes
from kvell.engine.lending.distributed_request import local_reason
from kvell.engine.planning.whole_prompts import check_whole_prompts
from kvell.engine.requests.limits import Limits, ModelRules, draft_tokens_end
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.sizes import PoolFlag, Sizes, flag_of
from kvell.errors import ChangeSomething
from kvell.memory import (
    LayerSpec,
    Layout,
    Manager,
    as_draft,
    longest_request,
    plan_layout,
    pool_bytes_for,
)
from kvell.vocabulary import KIB

if TYPE_CHECKING:
    from kvell.engine.setup.several_models import ServedModel
    from kvell.models.config.description import ModelDescription

MIN_MODEL_LEN = 2
"""The shortest request: one token of prompt and one of output."""


class DescribedModel(Protocol):
    """A model that is described, loaded or not."""

    @property
    def description(self) -> "ModelDescription":
        """The layers and sizes of the model."""
        ...


def rules_of(
    sizes: Sizes,
    served: "Sequence[ServedModel]",
    options: EngineOptions,
    draft: DescribedModel | None,
    layers: Sequence[LayerSpec],
) -> list[ModelRules]:
    """Return the rules of each model; ``options.max_model_len`` is only a cap after the first."""
    rules = []
    layout = sizes.promised
    flag = flag_of(sizes, options)
    for index, (name, model, eos) in enumerate((s.name, s.model, s.eos_token_ids) for s in served):
        model_len, given = model.description.max_model_len, options.max_model_len
        wish = min(model_len, given) if index and given is not None else given
        wished = replace(options, max_model_len=wish)
        drafter = None if index else draft
        limits = make_limits(layout, model, wished, drafter, name, layers, flag)
        own = layout.held_by(name) if name else layout
        takes_images = model.images is not None
        rules.append(ModelRules(name, limits, eos, own, takes_images, model.has_head))
    return rules


def make_limits(
    layout: Layout,
    model: DescribedModel,
    options: EngineOptions,
    draft: DescribedModel | None = None,
    name: str = "",
    layers: Sequence[LayerSpec] | None = None,
    flag: PoolFlag | None = None,
) -> Limits:
    """Return the limits of a model; ``max_model_len`` follows from the pool unless it is given.

    :param name: the model's name, if the pool has several.
    :param layers: all layers in the pool; None: those of the model and its draft model.
    :param flag: the flag to change if the pool is too small; None: ``--kv-memory``.
    :raises ChangeSomething: if a given ``max_model_len`` is not possible, or a common pool would be
        empty.
    """
    if options.common_pool and not options.enable_prefix_caching:
        problem = "protects prefixes that requests share, and --no-enable-prefix-caching keeps none"
        raise ChangeSomething("--common-pool", "on", problem, "leave out one of the two")
    model_len = check_length(model.description.max_model_len, options.max_model_len)
    wanted = options.max_model_len or model_len
    chunk_tokens, step_tokens = Limits().min_chunk_tokens, options.max_num_batched_tokens
    if not options.enable_chunked_prefill:
        check_whole_prompts(step_tokens, options.max_model_len or 0)
        wanted = min(wanted, step_tokens)
        chunk_tokens = step_tokens
    limits = Limits(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=wanted,
        reach_tokens=wanted if options.enable_chunked_prefill else 0,
        vocab_size=model.description.vocab_size,
        common_pool=options.common_pool,
        num_speculative_tokens=options.num_speculative_tokens,
        has_drafter=draft is not None,
        prompt_lookup_max=options.prompt_lookup_max,
        prompt_lookup_min=options.prompt_lookup_min,
        min_chunk_tokens=chunk_tokens,
        enable_chunked_prefill=options.enable_chunked_prefill,
        enable_prefix_caching=options.enable_prefix_caching,
        short_rope_tokens=model.description.short_rope_tokens,
        draft_tokens_end=draft_tokens_end(
            model_len, draft.description.max_model_len if draft else None
        ),
    )
    seen = layout.held_by(name) if name else layout
    fits = longest_request(seen, wanted, limits.min_chunk_tokens)
    if fits < (wanted if options.max_model_len else MIN_MODEL_LEN):
        if layers is None:
            drafts = as_draft(draft.description.layers) if draft else ()
            layers = (*model.description.layers, *drafts)
        enough_bytes = _enough_bytes(seen, layers, options.manager, limits, name)
        flag = flag or PoolFlag("--kv-memory", layout.pool_bytes)
        raise _too_small(flag, enough_bytes, wanted, fits, name)
    reach_tokens = 0 if local_reason(name, seen.groups) else limits.reach_tokens
    return replace(limits, max_model_len=fits, reach_tokens=reach_tokens)


def check_length(model_len: int, max_model_len: int | None) -> int:
    """Return the most tokens of a request that a model supports.

    :raises ChangeSomething: if ``max_model_len`` is higher.
    """
    if max_model_len is not None and max_model_len > model_len:
        problem = f"is above the model's own limit of {model_len} tokens"
        raise ChangeSomething("--max-model-len", max_model_len, problem, f"use at most {model_len}")
    return model_len


def _too_small(
    flag: PoolFlag, enough_bytes: int, wanted: int, fits: int, name: str
) -> ChangeSomething:
    """Return the error for a pool that fits a request of ``fits`` tokens, but not of ``wanted``."""
    need_kib = -(-(enough_bytes + flag.beside_bytes) // KIB)
    return ChangeSomething(
        flag.name,
        typed_bytes(flag.value_bytes),
        f"is too small for one request of --max-model-len={wanted}" + f" to {name}" * bool(name),
        f"use {flag.name} {need_kib}KiB"
        + (f" or --max-model-len {fits}" if fits >= MIN_MODEL_LEN else ""),
    )


def _enough_bytes(
    layout: Layout, layers: Sequence[LayerSpec], manager: Manager, limits: Limits, name: str
) -> int:
    """Return the bytes of a pool that fits one request of ``max_model_len``.

    A larger pool may have larger pages, so the layout is planned again until it fits.
    """
    wanted = limits.max_model_len
    chunk = min(wanted, limits.min_chunk_tokens)
    enough_bytes = pool_bytes_for(layout, wanted, chunk)
    while True:
        layout = plan_layout(layers, enough_bytes, manager=manager)
        layout = layout.held_by(name) if name else layout
        need_bytes = pool_bytes_for(layout, wanted, chunk)
        if need_bytes <= layout.pool_bytes:
            return enough_bytes
        enough_bytes = max(need_bytes, enough_bytes + layout.large_page_bytes)
