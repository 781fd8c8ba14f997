"""The opened and loaded models of an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvell.cost.prices import DEFAULT_PRICES, InstancePrices
from kvell.device.available import available_bytes, process_bytes
from kvell.device.weight_cache import WeightCache
from kvell.engine.assembly import build_engine, load_model
from kvell.engine.core.journal import Journal
from kvell.engine.engine import Engine
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.engine.setup.several_models import ServedModel
from kvell.engine.unloaded import check_named
from kvell.models.captured.graphs import CudaGraphs
from kvell.models.families.draft_model import check_draft
from kvell.models.loading.loading import check_model
from kvell.models.loading.named_models import NamedModel, open_named
from kvell.models.paged_model import PagedModel
from kvell.models.sources.progress import Progress
from kvell.models.sources.source import resolve_as

Pricing = Callable[[PagedModel, str, EngineSettings], InstancePrices]
"""Returns the prices of a loaded model, given its name and settings.  The model's memory may be
attached elsewhere meanwhile."""


@dataclass(frozen=True)
class OpenedModels:
    """Models with loaded weights, in order; the first may have a draft model."""

    named: Sequence[NamedModel]
    loaded: Sequence[PagedModel]
    draft: PagedModel | None
    floor_bytes: int
    cache: WeightCache | None = None

    @property
    def main(self) -> NamedModel:
        return self.named[0]

    def engine(
        self,
        settings: EngineSettings,
        journal: Journal | None = None,
        incarnation: int = 0,
        pricing: Pricing | None = None,
    ) -> Engine:
        """Build an engine over the models.

        :param pricing: prices the first model before the engine exists; None: the defaults.

        :raises ChangeSomething: names the setting that cannot work.
        """
        first = self.loaded[0]
        prices = DEFAULT_PRICES
        if pricing is not None:
            if self.cache is not None:
                self.cache.wait()  # its steps are timed
            prices = pricing(first, self.main.name, settings)
        records = first.device.type == "cuda" and not settings.enforce_eager
        engine = build_engine(
            first,
            self.main.name,
            settings,
            self.main.eos_token_ids,
            journal,
            incarnation,
            draft=self.draft,
            beside=[
                ServedModel(named.name, model, named.eos_token_ids, named.tokenizer_json)
                for named, model in zip(self.named[1:], self.loaded[1:], strict=True)
            ],
            floor_bytes=self.floor_bytes,
            tokenizer_json=self.main.tokenizer_json,
            prices=prices,
            graphs=CudaGraphs(first.device) if records else None,
        )
        for model in self.loaded:
            if model.captured is not None:
                model.captured.record_all()
        return engine


def open_served(
    settings: EngineSettings,
    cache_dir: Path,
    progress: Progress,
    weights_fd: int | None = None,
    *,
    reads_text: bool = True,
) -> OpenedModels:
    """Open the models of settings, and load their weights.

    :param cache_dir: directory of the packaged model after its conversion.
    :param weights_fd: descriptor of a memfd that holds the weights once for all processes of this
        host.
    :param reads_text: load the first model's tokenizer in a thread, beside the weights.
    :raises ChangeSomething: names the setting that cannot work.
    """
    floor_bytes = process_bytes()
    overrides = settings.overrides_json
    named = open_named(
        settings.model, settings.beside, cache_dir, progress, overrides, settings.tokenizer
    )
    cache = None
    if settings.weight_cache:
        cache = WeightCache(cache_dir / "weights", settings.weight_cache_size_bytes)
    load = partial(
        load_model,
        dtype=settings.dtype,
        device=settings.device,
        progress=progress,
        kv_cache_dtype=settings.kv_cache_dtype,
        enforce_eager=settings.enforce_eager,
        weights_fd=weights_fd,
        cache=cache,
        threads=settings.threads,
    )
    draft_path = _checked_draft(settings, named[0], cache_dir, progress)
    check_named(
        settings,
        [(model.name, model.path) for model in named],
        draft_path,
        available_bytes() // settings.memory_parts,
    )
    is_dummy = settings.load_format == "dummy"
    if reads_text and draft_path is None and not is_dummy:
        named[0] = named[0].with_early_tokenizer()
    budgets = [settings.kv_budget, *(None for _ in named[1:])]
    loaded = [
        load(
            model.path,
            kv_budget=budget,
            quantization=settings.quantization,
            overrides=model.overrides,
            is_dummy=is_dummy,
        )
        for model, budget in zip(named, budgets, strict=True)
    ]
    draft = load(draft_path) if draft_path is not None else None
    return OpenedModels(named, loaded, draft, floor_bytes, cache)


def _checked_draft(
    settings: EngineSettings, first: NamedModel, cache_dir: Path, progress: Progress
) -> Path | None:
    """Return the directory of the draft model; None without one."""
    name = settings.speculative_model
    if name is None:
        return None
    path = resolve_as("speculative_model", name, cache_dir, progress)
    check_model(path)
    check_draft(path, first.path, first.tokenizer, name, first.overrides)
    return path
