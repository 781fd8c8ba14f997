"""Attention in both directions within a prompt, over causal kernels.

Each such token becomes a request of its own whose context is the whole prompt: the last position of
a context attends to all of it, and the window is switched off.
"""

from dataclasses import replace
from typing import cast

import torch

from kvell.attention.interface import AttendParams, AttentionKernels, GroupBatch, LayerPages
from kvell.attention.sections import SectionKernels, SectionRecords


class BothDirections:
    """The prompts of one step with attention in both directions."""

    def __init__(self, prefix_tokens: tuple[int, ...]) -> None:
        """Take the prompts of a step.

        :param prefix_tokens: such tokens of each request of the step; 0 if all of it is causal.
        """
        self._prefixes = [(i, count) for i, count in enumerate(prefix_tokens) if count]
        self._batches: dict[int, GroupBatch] = {}

    def attend(
        self,
        kernels: AttentionKernels,
        pages: LayerPages,
        batch: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
        elsewhere: SectionRecords | None = None,
    ) -> torch.Tensor:
        """Attend as the kernels do, [T, heads, size], but in both directions in such prompts.

        :param elsewhere: records of remote sections, which no such prompt has yet.
        """
        if elsewhere is None:
            output = kernels.attend(pages, batch, query, params)
        else:
            of_sections = cast(SectionKernels, kernels)
            output = of_sections.attend(pages, batch, query, params, elsewhere)
        if self._prefixes:
            rows = self._rows(batch)
            if id(batch) not in self._batches:
                self._batches[id(batch)] = self._apart(batch)
            apart = self._batches[id(batch)]
            whole = replace(params, window_tokens=0)
            output[rows] = kernels.attend(pages, apart, query[rows], whole)
        return output

    def _rows(self, batch: GroupBatch) -> torch.Tensor:
        starts = batch.query_starts.tolist()
        spans = [torch.arange(starts[i], starts[i] + n) for i, n in self._prefixes]
        return torch.cat(spans).to(batch.query_starts.device)

    def _apart(self, batch: GroupBatch) -> GroupBatch:
        """Return metadata with every token of the prompts as a request of one token."""
        size_of = batch.table_starts.diff().tolist()
        begins = batch.table_starts.tolist()
        contexts = []
        counts = []
        tables: list[torch.Tensor] = []
        for i, count in self._prefixes:
            table = batch.page_ids[begins[i] : begins[i] + size_of[i]]
            tables.append(table.repeat(count))
            contexts += [count] * count
            counts += [size_of[i]] * count
        device = batch.page_ids.device
        lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        return GroupBatch(
            query_starts=torch.arange(len(contexts) + 1, dtype=torch.int32, device=device),
            context_lens=lens,
            table_starts=torch.tensor([0, *counts], device=device).cumsum(0).int(),
            page_ids=torch.cat(tables),
            first_positions=torch.zeros_like(lens),
            write_page_ids=lens[:0],
            write_offsets=lens[:0],
        )
