"""Plans and tables of small batches."""

from collections.abc import Sequence

import numpy as np

from kvell.engine.requests.plan import StepPlan, TokenWork
from kvell.engine.running.batching import GroupArrays, PageTables
from kvell.memory import GroupSpec
from kvell.vocabulary import StepNumber
from tests.engine.works import work_of
from tests.pages.pools import group

FULL, SLIDING = group(4, 2), group(4, 3, window=6)

Row = tuple[int, int, int, int]


def plan(rows: Sequence[Row], released: tuple[int, ...] = ()) -> StepPlan:
    pages = np.asarray(rows, np.int32).reshape(-1, 4)
    return StepPlan(StepNumber(1), released=released, new_pages=pages)


def work(handle: int, start: int, count: int) -> TokenWork:
    return work_of(f"q{handle}", handle, start, count)


def tables(
    kind: type[PageTables], *rows: Row, groups: Sequence[GroupSpec] = (FULL, SLIDING)
) -> PageTables:
    made = kind(groups)
    made.update(plan(rows))
    return made


def as_lists(arrays: GroupArrays) -> dict[str, list[int]]:
    return {name: values.tolist() for name, values in arrays.fields.items()}
