"""The model that is calibrated, in an engine of its own."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kvell.calibration.design import (
    Point,
    possible,
)
from kvell.calibration.prints import model_print
from kvell.calibration.rig import Rig, SkippingModel
from kvell.clock import Clock
from kvell.cost.amounts import ModelShape, shape_of
from kvell.cost.calibration import ModelPrint
from kvell.engine.assembly import (
    EngineOptions,
    build_engine,
    load_model,
)
from kvell.engine.engine import Engine
from kvell.engine.running.copies.copies_under_pass import copies_beside_passes
from kvell.memory import requests_that_fit
from kvell.models.loading.loading import check_model
from kvell.models.paged_model import PagedModel
from kvell.models.sources.progress import Progress
from kvell.models.sources.source import resolve_model
from kvell.simulator.hardware.model_cost import model_cost

OUTPUT_TOKENS = 64
"""Tokens that a request may generate beyond the start of its step."""


@dataclass(frozen=True)
class Subject:
    """An engine for a rig, and the facts about its model.

    :param copies_under_pass: whether it would copy pages to a CPU buffer during its passes.
    """

    engine: Engine
    model: SkippingModel
    shape: ModelShape
    print: ModelPrint
    inner_size: int
    dtype: torch.dtype
    copies_under_pass: bool = False

    @property
    def paged_model(self) -> PagedModel:
        return self.model.whole

    def rig(self, clock: Clock, seed: int = 0) -> Rig:
        return Rig(self.engine, self.model, clock, seed)

    def can(self, points: tuple[Point, ...]) -> list[Point]:
        limits, layout = self.engine.core.limits, self.engine.core.memory.layout

        def fits(requests: int, tokens: int) -> bool:
            whole = tokens + OUTPUT_TOKENS
            if whole > limits.max_model_len:
                return False
            return requests <= requests_that_fit(layout, whole, limits.max_num_seqs)

        return possible(points, fits, limits.max_num_batched_tokens, limits.max_num_seqs)


def subject_of(model: PagedModel, name: str, options: EngineOptions) -> Subject:
    """Return a loaded model in an engine; prompts are drawn from its vocabulary's ids.

    :raises ChangeSomething: as :func:`kvell.engine.assembly.build_engine`.
    """
    description = model.description
    skipping = SkippingModel(model)
    # The engine takes any object that behaves like a model.
    engine = build_engine(skipping, name, options)  # type: ignore[arg-type]
    return Subject(
        engine,
        skipping,
        shape_of(description.layers),
        print_of(model, name),
        description.hidden_size,
        model.dtype,
        copies_beside_passes(options.copies_under_pass),
    )


def print_of(model: PagedModel, name: str) -> ModelPrint:
    description = model.description
    cost = model_cost(model.module.config, description, model.dtype.itemsize)
    dtype = str(model.dtype).removeprefix("torch.")
    return model_print(name, dtype, description, cost.active_weights)


def load_subject(
    name: str,
    dtype: str,
    device: str,
    options: EngineOptions,
    cache_dir: Path,
    progress: Progress,
    kv_cache_dtype: str = "auto",
    threads: int | None = None,
) -> Subject:
    """Load the model that ``--model`` names.


    :raises ChangeSomething: if there is no such model, or it cannot be served.
    """
    path = resolve_model(name, cache_dir, progress)
    check_model(path)
    model = load_model(path, dtype, device, progress, kv_cache_dtype, threads=threads)
    return subject_of(model, name, options)
