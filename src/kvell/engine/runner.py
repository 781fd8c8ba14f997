"""Runs a step plan: the only part of the engine that touches tensors."""

from typing import Protocol

import numpy as np
import torch

from kvell.attention.interface import GroupBatch
from kvell.attention.states import StateBatch
from kvell.engine.batching import GroupArrays, PageTables, StateArrays, token_positions
from kvell.engine.plan import PageCopy, StepPlan, StepResult
from kvell.engine.proposals import verified
from kvell.engine.sampling import RowSampling, sample
from kvell.engine.sampling_params import SamplingParams
from kvell.memory import GroupKind, Layout, SlotTable
from kvell.models.paged_model import ForwardBatch, PagedModel


class Runner(Protocol):
    """Carries out plans. The simulator's answers from a trace; this file's from a model."""

    def run(self, plan: StepPlan) -> StepResult:
        """Do everything the plan says, in its order; returns the tokens it sampled."""
        ...


class ModelRunner:
    """A model over one pool (uint8 [bytes], on the model's device)."""

    def __init__(
        self, model: PagedModel, layout: Layout, slots: SlotTable, pool: torch.Tensor
    ) -> None:
        self._model = model
        self._pool = pool
        self._slots = slots
        self._layout = layout
        self._tables = PageTables(layout.groups, slots)

    def run(self, plan: StepPlan) -> StepResult:
        """See :class:`Runner`."""
        if plan.moves:
            raise RuntimeError(f"step {plan.step} moves bytes, which this runner cannot do")
        self._tables.update(plan)
        for copy in plan.copies:
            self._copy(copy)
        if not plan.work:
            return StepResult(plan.step, ())
        logits = self._model.forward(self._batch(plan))
        rows = [
            _row(work.sampling, work.output_index + index)
            for work in plan.work
            if work.sampling is not None
            for index in range(work.num_logits)
        ]
        return verified(plan, sample(logits, rows))

    def _copy(self, copy: PageCopy) -> None:
        """All bytes of one page to another of its group."""
        group = self._layout.groups[copy.group]
        pages = np.asarray([copy.source, copy.target], np.int32)
        source, target = (
            int(page) * group.page_stride_bytes
            for page in self._slots.physical(pages, group.pages_per_large)
        )
        size = group.page_stride_bytes
        self._pool[target : target + size].copy_(self._pool[source : source + size])

    def _group(self, index: int, plan: StepPlan, device: torch.device) -> GroupBatch | StateBatch:
        if self._layout.groups[index].kind is GroupKind.STATE:
            arrays = self._tables.states(index, plan.work, plan.checkpoints)
            return _to_pool(arrays, device)
        return _to_device(self._tables.arrays(index, plan.work), device)

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        starts = np.fromiter((w.start for w in plan.work), np.int64, len(plan.work))
        counts = np.fromiter((w.count for w in plan.work), np.int64, len(plan.work))
        logits = np.fromiter((w.num_logits for w in plan.work), np.int64, len(plan.work))
        logits_rows = token_positions(np.cumsum(counts) - logits, logits)
        device = self._model.device
        return ForwardBatch(
            token_ids=torch.from_numpy(
                np.concatenate([w.token_ids for w in plan.work]).astype(np.int64)
            ).to(device),
            positions=torch.from_numpy(token_positions(starts, counts)).to(device),
            groups=tuple(
                self._group(index, plan, device) for index in range(len(self._layout.groups))
            ),
            logits_rows=torch.from_numpy(logits_rows).to(device),
        )


def _to_pool(arrays: StateArrays, device: torch.device) -> StateBatch:
    """Pages to where the pool is; what cuts scans stays on the CPU."""
    named = {name: torch.from_numpy(values) for name, values in vars(arrays).items()}
    for name in ("page_ids", "cut_page_ids"):
        named[name] = named[name].to(device)
    return StateBatch(**named)


def _to_device(arrays: GroupArrays, device: torch.device) -> GroupBatch:
    return GroupBatch(
        **{name: torch.from_numpy(values).to(device) for name, values in vars(arrays).items()}
    )


def _row(params: SamplingParams, position: int) -> RowSampling:
    return RowSampling(params.temperature, params.top_k, params.top_p, params.seed or 0, position)
