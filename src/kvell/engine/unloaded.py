"""Checks of settings that need the models' configs and no weights.

Weights take seconds to minutes to load; these checks come before, and import no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvell.engine.setup.engine_settings import EngineSettings
from kvell.engine.setup.model_limits import check_length, make_limits
from kvell.engine.setup.sizes import check_buffer, layout_of, too_much
from kvell.memory import LayerSpec, as_draft
from kvell.models.config.activations import activation_model
from kvell.models.config.budgets import budgets_of, with_budgets
from kvell.models.config.description import ModelDescription, describe
from kvell.models.config.kv_dtypes import ELEMENT_BYTES, KV_DTYPES, kv_dtype_named
from kvell.models.config.quantization import require_quantization
from kvell.models.families.plain_config import known_config
from kvell.models.loading.model_weights import weight_files_bytes


@dataclass(frozen=True)
class UnloadedModel:
    """A model whose config is read, and nothing else."""

    name: str
    path: Path
    description: ModelDescription
    step_bytes: int

    @property
    def weight_file_bytes(self) -> int:
        """The size of its weights in their files; 0 if it has none."""
        return weight_files_bytes(self.path)


def read_unloaded(
    name: str, path: Path, settings: EngineSettings, *, is_first: bool
) -> UnloadedModel:
    """Read the config of a model.

    :param is_first: whether settings of the first model alone apply to it.
    :raises ChangeSomething: if the config, or a setting of the model, cannot work.
    """
    config = known_config(path, settings.overrides_json if is_first else None)
    stored = KV_DTYPES[kv_dtype_named(settings.kv_cache_dtype, settings.dtype)]
    element_bytes = ELEMENT_BYTES[settings.dtype]
    description = describe(config, stored.element_bytes, stored.scale_bytes, element_bytes)
    if settings.kv_budget is not None and is_first:
        budgets = budgets_of(description.layers, settings.kv_budget)
        description = replace(description, layers=with_budgets(description.layers, budgets))
    step = activation_model(config)
    step_bytes = step.need_bytes(settings.max_num_batched_tokens, settings.max_step_logits)
    return UnloadedModel(name, path, description, step_bytes)


def check_named(
    settings: EngineSettings,
    named: Sequence[tuple[str, Path]],
    draft_path: Path | None,
    free_bytes: int,
) -> None:
    """Read the configs of models, and check the settings of their engine.

    :param draft_path: directory of the draft model, if there is one.
    :param free_bytes: free host memory for this engine.
    :raises ChangeSomething: naming the setting that cannot work, and a value that can.
    """
    models = [
        read_unloaded(name, path, settings, is_first=number == 0)
        for number, (name, path) in enumerate(named)
    ]
    draft = (
        None
        if draft_path is None
        else read_unloaded(str(draft_path), draft_path, settings, is_first=False)
    )
    check_unloaded(models, draft, settings, free_bytes)


def check_unloaded(
    models: Sequence[UnloadedModel],
    draft: UnloadedModel | None,
    settings: EngineSettings,
    free_bytes: int,
) -> None:
    """Check the settings of an engine before its models are loaded.

    The same checks are made again, more exactly, once weights are loaded.

    :raises ChangeSomething: naming the setting that cannot work, and a value that can.
    """
    require_quantization(settings.quantization)
    check_length(models[0].description.max_model_len, settings.max_model_len)
    if settings.device != "cpu":
        return
    if settings.memory_bytes is not None and settings.memory_bytes > free_bytes:
        raise too_much("--memory", settings.memory_bytes, free_bytes, 0)
    pool_bytes = settings.kv_memory_bytes
    if pool_bytes is None or settings.memory_bytes is not None:
        check_buffer(settings, free_bytes)
        return
    if pool_bytes > free_bytes:
        # More than this is needed for certain; how much more is known once weights are loaded.
        left_bytes = free_bytes - sum(model.weight_file_bytes for model in models)
        beside_bytes = max(model.step_bytes for model in models)
        raise too_much("--kv-memory", pool_bytes, left_bytes, beside_bytes)
    check_buffer(settings, free_bytes - pool_bytes)
    _check_one_request(models, draft, settings, pool_bytes)


def _check_one_request(
    models: Sequence[UnloadedModel],
    draft: UnloadedModel | None,
    settings: EngineSettings,
    kv_bytes: int,
) -> None:
    """Check that the pool has room for one request of the first model.

    :raises ChangeSomething: if it has not.
    """
    several = len(models) > 1
    layers: list[LayerSpec] = [
        replace(layer, model=model.name if several else "")
        for model in models
        for layer in model.description.layers
    ]
    drafts = as_draft(draft.description.layers) if draft is not None else ()
    layers += [replace(layer, model=models[0].name if several else "") for layer in drafts]
    layout = layout_of(layers, kv_bytes, settings)
    make_limits(layout, models[0], settings, draft, models[0].name if several else "", layers)
