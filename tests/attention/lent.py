"""Contexts whose first sections lie in other pools than the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from kvell.attention.interface import GroupBatch
from kvell.attention.sections import SectionKernels, SectionRecords
from kvell.vocabulary import SECTION_TOKENS
from tests.attention.cases import Case, Stored, make_layer, starts_of, writing
from tests.attention.section_records import section_records


def join_records(parts: Sequence[Sequence[torch.Tensor]], empty: torch.Tensor) -> SectionRecords:
    """Join the records that several instances returned for a batch.

    :param parts: each request's parts in order of position, shaped as :meth:`SectionRecords.of`.
    :param empty: float32 [0, heads, 2 + output_size], for batches without records.
    """
    flat = [[part.flatten(0, 1) for part in of_request] for of_request in parts]
    rows = [sum(len(part) for part in of_request) for of_request in flat]
    starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
    return SectionRecords(starts, torch.cat([empty, *(part for group in flat for part in group)]))


@dataclass(frozen=True)
class Held:
    """Positions [begin, end) of one request, in one pool."""

    request: int
    begin: int
    end: int


@dataclass(frozen=True)
class Split:
    """Where the first sections of one request lie: run i is [cuts[i], cuts[i + 1]).

    :param cuts: sections, from 0 on, never falling; runs may be empty.
    :param creditors: of each run.
    """

    cuts: tuple[int, ...] = (0,)
    creditors: tuple[int, ...] = ()

    @property
    def sections(self) -> int:
        return self.cuts[-1]


def hold(kernels: SectionKernels, case: Case, held: Sequence[Held], placement: int) -> Stored:
    """A pool with nothing but these parts of contexts, and a batch with one entry for each."""
    shape = case.shape
    firsts = [one.begin // shape.page_tokens for one in held]
    pages = [
        -(-one.end // shape.page_tokens) - first for one, first in zip(held, firsts, strict=True)
    ]
    order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(placement))
    tables = torch.split(order[: sum(pages)].to(torch.int32), pages)
    layer = make_layer(shape, sum(pages) + 3)
    for one, table, first in zip(held, tables, firsts, strict=True):
        if one.begin < one.end:
            written = writing(table, one.begin, one.end, shape.page_tokens, first)
            rows = slice(one.begin, one.end)
            value = None if shape.value_size else case.values[one.request][rows]
            kernels.write_kv(layer, written, case.keys[one.request][rows], value)
    requests = [shape.requests[one.request] for one in held]
    none = torch.zeros(0, dtype=torch.int32)
    batch = GroupBatch(
        starts_of([new for _, new in requests]),
        torch.tensor([context for context, _ in requests], dtype=torch.int32),
        starts_of(pages),
        torch.cat([*tables, none]),
        torch.tensor(firsts, dtype=torch.int32),
        none,
        none,
    )
    return Stored(layer, batch)


def queries_of(case: Case, held: Sequence[Held]) -> torch.Tensor:
    shape = case.shape
    rows = []
    for one in held:
        context, new = shape.requests[one.request]
        rows.append(case.queries[one.request][context - new :])
    none = torch.zeros(0, shape.heads, shape.head_size, dtype=shape.dtype)
    return torch.cat([*rows, none])


def partials_of(
    kernels: SectionKernels, case: Case, held: Sequence[Held], placement: int
) -> list[torch.Tensor]:
    stored = hold(kernels, case, held, placement)
    query = queries_of(case, held)
    found = section_records(kernels, stored.layer, stored.batch, query, case.shape.params)
    return [found.of(i, case.shape.requests[one.request][1]) for i, one in enumerate(held)]


def elsewhere_of(
    kernels: SectionKernels, case: Case, splits: Sequence[Split], placement: int
) -> SectionRecords:
    runs = [
        (creditor, i, Held(i, first * SECTION_TOKENS, end * SECTION_TOKENS))
        for i, split in enumerate(splits)
        for (first, end), creditor in zip(pairwise(split.cuts), split.creditors, strict=True)
    ]
    found: dict[Held, torch.Tensor] = {}
    for creditor in {creditor for creditor, _, _ in runs}:
        held = [one for owner, _, one in runs if owner == creditor]
        parts = partials_of(kernels, case, held, placement + creditor + 1)
        found |= dict(zip(held, parts, strict=True))
    parts_of = [[found[one] for _, owner, one in runs if owner == i] for i in range(len(splits))]
    shape = case.shape
    none = torch.empty(0, shape.heads, 2 + (shape.value_size or shape.head_size))
    return join_records(parts_of, none)


def local_part(case: Case, splits: Sequence[Split]) -> list[Held]:
    return [
        Held(i, split.sections * SECTION_TOKENS, context)
        for i, ((context, _), split) in enumerate(zip(case.shape.requests, splits, strict=True))
    ]


def attend_lent(
    kernels: SectionKernels, case: Case, splits: Sequence[Split], placement: int = 0
) -> torch.Tensor:
    elsewhere = elsewhere_of(kernels, case, splits, placement)
    held = local_part(case, splits)
    stored = hold(kernels, case, held, placement)
    return kernels.attend(
        stored.layer, stored.batch, queries_of(case, held), case.shape.params, elsewhere
    )
