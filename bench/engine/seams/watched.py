"""The calls of the instance's loop that are watched, and their stage names.

Watches are installed from outside; the served code knows nothing of them.
"""

import selectors
from typing import Any

import torch

from bench.engine.seams.recorder import Recorder
from kvell.engine.core.core import EngineCore
from kvell.engine.engine import Engine
from kvell.engine.requests.plan import StepPlan
from kvell.engine.running import runner
from kvell.engine.running.batching import PageTables
from kvell.engine.running.forward_batches import ForwardBatches
from kvell.models.fused import _forward
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.serving import loop
from kvell.serving.fronts import ConnectedFront


class NoCallbacks:
    """Callbacks that do nothing."""

    def after_kv_write(self, layer: int) -> None:
        """Nothing."""

    def before_attend(self, layer: int, query: torch.Tensor) -> None:
        """Nothing."""

    def after_attend(self, layer: int, output: torch.Tensor) -> None:
        """Nothing."""


def watch_loop(recorder: Recorder) -> None:
    """Install all watches."""
    watch = recorder.watch
    recorder.watch_operators(_forward.Forward, "run")
    _alternate_callbacks(recorder)
    watch(PagedModel, "forward", "pass around operators")
    watch(runner, "sample", "sampling")
    watch(ForwardBatches, "batch", "batching arrays")
    watch(PageTables, "update", "page tables")
    watch(runner.ModelRunner, "run", "runner")
    _note_plans(recorder)
    watch(EngineCore, "plan", "plan")
    watch(EngineCore, "commit", "commit")
    watch(Engine, "step", "engine")
    watch(ConnectedFront, "send", "encoding and sending")
    watch(ConnectedFront, "receive", "receiving")
    watch(selectors.DefaultSelector, "select", "waiting")
    watch(loop._Serving, "turn", "loop")


def _alternate_callbacks(recorder: Recorder) -> None:
    """Make every other pass call empty callbacks at each layer."""
    forward, nothing, passes = PagedModel.forward, NoCallbacks(), recorder.record.with_callbacks

    def alternating(model: PagedModel, batch: ForwardBatch, callbacks: Any = None) -> torch.Tensor:
        passes.append(len(passes) % 2 == 1)
        return forward(model, batch, nothing if passes[-1] else callbacks)

    setattr(PagedModel, forward.__name__, alternating)


def _note_plans(recorder: Recorder) -> None:
    plan, plans = EngineCore.plan, recorder.record.plans

    def noted(core: EngineCore) -> StepPlan:
        made = plan(core)
        plans.append((len(made.work), made.num_tokens))
        return made

    setattr(EngineCore, plan.__name__, noted)
