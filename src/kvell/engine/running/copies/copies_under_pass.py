"""Copies between pool and CPU buffer on a thread during the pass, stage by stage.

::

    copier   layers 0–3: out, in │ 4–7: out, in │ …          │ out: pages not written here  │
    pass                         │ layers 0–3   │ layers 4–7 │ …  logits, tokens            │ result

A pass waits after a layer only for the pages of the next layer.  All copies end with their step,
even if its pass failed: between steps no memory changes.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Self

import torch

from kvell.engine.cpu_buffer.swapping import moved_bytes
from kvell.engine.requests.plan import StepPlan
from kvell.engine.running.copies.copy_order import CopyOrder, copy_order, has_spare_processor
from kvell.engine.running.copies.page_mover import PageMover
from kvell.memory import GroupSpec
from kvell.models.forward.segments import LayerCallbacks
from kvell.pages.stages import Stage, stages_of


@dataclass
class CopyCounts:
    """The bytes copied between pool and buffer so far, before or during passes.

    :ivar waits: number of times that a pass waited for a stage's pages.
    """

    before_bytes: int = 0
    under_bytes: int = 0
    waits: int = 0


def copies_beside_passes(wanted: bool | None) -> bool:
    """Return whether pages are copied to the CPU buffer and back during passes.

    :param wanted: None: if a processor is free for it.
    """
    if wanted is not None:
        return wanted
    return has_spare_processor(len(os.sched_getaffinity(0)), torch.get_num_threads())


class Copier:
    """The executor of a plan's copies: before the pass, or during it if results do not change.

    :param has_spare: whether a processor is free for copies while a pass computes.
    """

    def __init__(
        self,
        mover: PageMover,
        groups: Sequence[GroupSpec],
        models: Sequence[str],
        *,
        on_host: bool,
        takes_images: bool = False,
        has_spare: bool = True,
    ) -> None:
        self.counts = CopyCounts()
        self.mover, self._groups = mover, groups
        self._on_host, self._takes_images, self._has_spare = on_host, takes_images, has_spare
        self.stages = {name: stages_of(groups, name) for name in models}
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, plan: StepPlan) -> "StepCopies":
        """Make the copies that must precede the pass, and start the others."""
        if not len(plan.offloads) and not len(plan.fetches):
            if plan.copies:
                self.mover.copy(plan.copies)
            return StepCopies(self.counts)
        order = copy_order(
            plan,
            self._groups,
            on_host=self._on_host,
            takes_images=self._takes_images,
            has_spare=self._has_spare,
        )
        for rows in (order.first_out, order.first_in):
            self.counts.before_bytes += moved_bytes(rows, self._groups)
        for rows in (order.layered_out, order.layered_in, order.last_out):
            self.counts.under_bytes += moved_bytes(rows, self._groups)
        self.mover.offload(order.first_out)
        self.mover.fetch(order.first_in)
        self.mover.copy(plan.copies)
        if not order.is_under_pass:
            return StepCopies(self.counts)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-copies")
        computing = {work.spec.model for work in plan.work}
        stages = {name: some for name, some in self.stages.items() if name in computing}
        return PassCopies(self.counts, self.mover, order, stages, self._thread)


class StepCopies:
    """The copies of a step without copies during its passes; a context that ends with the step."""

    def __init__(self, counts: CopyCounts) -> None:
        self.counts = counts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all copies have ended."""

    def seams(self, model: str) -> LayerCallbacks | None:
        """Wait until a model's pass may begin; return the callbacks for its seams."""
        return None


class PassCopies(StepCopies):
    """The copies of a step with copies during its passes."""

    def __init__(
        self,
        counts: CopyCounts,
        mover: PageMover,
        order: CopyOrder,
        stages: Mapping[str, Sequence[Stage]],
        thread: ThreadPoolExecutor,
    ) -> None:
        super().__init__(counts)
        self.mover = mover
        self._out = mover.pieces(order.layered_out, is_out=True)
        self._in = mover.pieces(order.layered_in, is_out=False)
        self.stages = stages if self._out or self._in else {}
        self._last = order.last_out
        self._has_failed = False
        self._copied = {
            name: [threading.Event() for _ in some] for name, some in self.stages.items()
        }
        self.made: Future[None] = thread.submit(self._make)

    def __exit__(self, *_: object) -> None:
        self.made.result()

    def seams(self, model: str) -> LayerCallbacks | None:
        stages = self.stages.get(model)
        if not stages:
            return None
        seams = _Seams(self, model, [stage.after_layer for stage in stages])
        seams.wait(0)
        return seams

    def wait_for(self, model: str, stage: int) -> None:
        """Wait until a stage of a model is copied.

        :raises RuntimeError: if a copy failed.
        """
        copied = self._copied[model][stage]
        if not copied.is_set():
            self.counts.waits += 1
            copied.wait()
        if self._has_failed:
            raise RuntimeError("pages that the pass needs were not copied")

    def _make(self) -> None:
        try:
            for name, stages in self.stages.items():
                for stage, copied in zip(stages, self._copied[name], strict=True):
                    self.mover.move_parts(self._out, stage.parts, is_out=True)
                    self.mover.move_parts(self._in, stage.parts, is_out=False)
                    copied.set()
            self.mover.offload(self._last)
        except BaseException:
            self._has_failed = True
            for copied in chain.from_iterable(self._copied.values()):
                copied.set()  # the waiting thread then raises
            raise


class _Seams:
    """Callbacks that wait at the seams of one model's pass."""

    def __init__(self, copies: PassCopies, model: str, after_layers: Sequence[int]) -> None:
        self._copies, self._model, self._after_layers = copies, model, after_layers

    def after_kv_write(self, layer: int) -> None:
        """Do nothing."""

    def before_attend(self, layer: int, query: torch.Tensor) -> None:
        """Do nothing."""

    def after_attend(self, layer: int, output: torch.Tensor) -> None:
        """Wait for the pages of the next layer."""
        self.wait(bisect_right(self._after_layers, layer) - 1)

    def wait(self, stage: int) -> None:
        self._copies.wait_for(self._model, stage)
