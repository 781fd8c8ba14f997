"""Runs a step plan: the only part of the engine that touches tensors."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from kvell.engine.batching import PageTables
from kvell.engine.drafter import Drafter
from kvell.engine.drawn import DrawnBefore
from kvell.engine.forward_batches import ForwardBatches
from kvell.engine.page_mover import PageMover
from kvell.engine.plan import StepPlan, StepResult, TokenWork
from kvell.engine.proposals import verified
from kvell.engine.sampling import GREEDY, RowSampling, sample
from kvell.engine.sampling_params import SamplingParams
from kvell.engine.slot_memory import SlotMemory
from kvell.memory import Layout, SlotTable
from kvell.models.paged_model import PagedModel


class Runner(Protocol):
    """Carries out plans. The simulator's answers from a trace; this file's from a model."""

    def run(self, plan: StepPlan) -> StepResult:
        """Do everything the plan says, in its order; returns the tokens it sampled."""
        ...


class ModelRunner:
    """Models over one pool (uint8 [bytes], on the models' device).

    :param draft: a model that guesses for the first, attached to the same pool.
    :param name: of the first model; "" if it is the only one.
    :param beside: further models by name, attached to the same pool.
    :param lends: gives models the slot of a step, where activations share the pool.
    :param buffer: the CPU buffer (uint8 [bytes], host memory), if plans offload pages.
    """

    def __init__(
        self,
        model: PagedModel,
        layout: Layout,
        slots: SlotTable,
        pool: torch.Tensor,
        draft: PagedModel | None = None,
        name: str = "",
        beside: Mapping[str, PagedModel] = MappingProxyType({}),
        lends: SlotMemory | None = None,
        buffer: torch.Tensor | None = None,
    ) -> None:
        self._lends = lends
        self._layout = layout
        self._pages = PageMover(layout, slots, pool, buffer)
        self._tables = PageTables(layout.groups, slots)
        self._models = {
            served: (one, self._batches_of(one, served))
            for served, one in {name: model, **beside}.items()
        }
        self._before = DrawnBefore()
        self._drafter: Drafter | None = None
        if draft is not None:
            batches = self._batches_of(draft, is_draft=True)
            self._drafter = Drafter(draft, layout, batches)

    def run(self, plan: StepPlan) -> StepResult:
        """See :class:`Runner`."""
        if plan.moves:
            raise RuntimeError(f"step {plan.step} moves bytes, which this runner cannot do")
        self._tables.update(plan)
        self._pages.offload(plan.offloads)
        self._pages.fetch(plan.fetches)
        self._pages.copy(plan.copies)
        if not plan.work:
            return StepResult(plan.step, ())
        if self._lends is not None and plan.slot is not None:
            self._lends.lend(plan.slot)
        plan = self._before.filled(plan)
        if self._drafter is not None:
            plan = self._drafter.with_guesses(plan)
        parts = {name: [work for work in plan.work if work.model == name] for name in self._models}
        drawn = {name: iter(self._draw(name, part, plan)) for name, part in parts.items() if part}
        tokens = [next(drawn[work.model]) for work in plan.work for _ in range(work.num_logits)]
        result = verified(plan, tokens)
        self._before.note(plan, result)
        return result

    def _draw(self, name: str, part: Sequence[TokenWork], plan: StepPlan) -> list[int]:
        """One model computes its part of a step; a token for each of the part's logits."""
        model, batches = self._models[name]
        logits = model.forward(batches.batch(part, plan.checkpoints))
        rows = [
            _row(work.sampling, work.output_index + index)
            for work in part
            if work.sampling is not None
            for index in range(work.num_logits)
        ]
        return sample(logits, rows)

    def _batches_of(
        self, model: PagedModel, name: str = "", *, is_draft: bool = False
    ) -> ForwardBatches:
        groups = self._layout.indices_of(name, is_draft=is_draft)
        return ForwardBatches(self._layout, self._tables, groups, model.device, model.images)


def _row(params: SamplingParams, position: int) -> RowSampling:
    if params.temperature == 0:
        return GREEDY
    return RowSampling(params.temperature, params.top_k, params.top_p, params.seed or 0, position)
