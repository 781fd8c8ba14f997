"""Steps on a device that computes one while the next is planned and started; no second thread.

::

    loop     plan 1 start 1 │ plan 2 start 2 │ wait 1, commit 1 │ plan 3 start 3 │ wait 2 …
    device          [copy, step 1 ][copy, step 2 .............................][copy, step 3 …

A recorded step reads the tokens of the one before from their seats.  A step that is computed needs
them on the host, and so waits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from heapq import heappop, heappush

import numpy as np
import torch
from typing_extensions import override

from kvell.engine.failing.failures import StepFailed
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import PENDING, StepPlan, StepResult, TokenWork
from kvell.engine.running.batching import Ints
from kvell.engine.running.runner import ModelRunner
from kvell.memory import GroupSpec, Layout
from kvell.models.captured.graphs import Graphs
from kvell.models.captured.slots import NO_SEAT, DecodeRows, SlotLimits
from kvell.models.paged_model import PagedModel


class DeviceSeats:
    """The seats of one model's requests, the smallest free one first.

    ::

        step n     row of a request ─ draws ─► its seat
        step n+1   planned before the token is known ─ reads ─► its seat

    :param count: seats on the device; a request without one has its tokens from the host.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._taken: dict[int, int] = {}

    def release(self, handles: Iterable[int]) -> None:
        for handle in handles:
            seat = self._taken.pop(handle, None)
            if seat is not None:
                heappush(self._free, seat)

    def targets(self, work: Sequence[TokenWork]) -> Ints:
        """Return the seat of each row's token, int32; NO_SEAT where none is free."""
        for item in work:
            if item.handle not in self._taken and self._free:
                self._taken[item.handle] = heappop(self._free)
        return self._of(item.handle for item in work)

    def sources(self, work: Sequence[TokenWork]) -> Ints | None:
        """Return the seat of each row whose token the previous step draws, NO_SEAT for the others.

        None if such a row has no seat.
        """
        is_pending = np.array([item.token_ids.item(-1) == PENDING for item in work])
        seats = self._of(item.handle for item in work)
        if (is_pending & (seats == NO_SEAT)).any():
            return None
        return np.where(is_pending, seats, np.int32(NO_SEAT))

    def _of(self, handles: Iterable[int]) -> Ints:
        return np.array([self._taken.get(handle, NO_SEAT) for handle in handles], np.int32)


class Flight:
    """A step on the device, or done."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._finish: Callable[[], StepResult] | None = finish
        self._result: StepResult | None = None
        self._failure: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self._finish is None

    def settle(self) -> None:
        """Wait for the step, whatever comes of it."""
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self._result = finish()
            except Exception as failure:
                self._failure = failure

    def result(self) -> StepResult:
        """Wait for the result.

        :raises StepFailed: if its work failed.
        """
        self.settle()
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result


class StartingModelRunner(ModelRunner):
    """Models on a device that records their decode steps.

    The device computes a step while the next one is planned and started.
    """

    _flight: Flight | None = None

    @cached_property
    def _seats(self) -> dict[str, DeviceSeats]:
        return {
            name: DeviceSeats(model.captured.num_seats)
            for name, (model, _) in self.models.items()
            if model.captured is not None
        }

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Give the device a step; return a function that waits for its result.

        That raises :class:`StepFailed`, as :meth:`run` does.  Call it once, in order of the steps.
        """
        for seats in self._seats.values():
            seats.release(plan.released)
        if plan.copies or len(plan.offloads) or len(plan.fetches):
            self._follow()
        launch = self._prepared(plan)
        try:
            flight = Flight(launch())
        except StepFailed as failure:
            flight = Flight(partial(_fail, failure))
        if not self.is_ahead:
            flight.settle()
        self._flight = flight
        return flight.result

    def settle(self) -> None:
        """Wait until no step runs, whatever comes of it."""
        if self._flight is not None:
            self._flight.settle()

    def device_steps(self) -> dict[str, int]:
        """Return the numbers of ``recorded`` steps, and of others by reason."""
        passes = [model.captured for model, _ in self.models.values()]
        counts = sum((each.counts for each in passes if each is not None), Counter[str]())
        return dict(counts)

    def _follow(self) -> None:
        for model, _ in self.models.values():
            if model.captured is not None:
                model.captured.graphs.follow()

    @override
    def _decode_rows(self, name: str, work: Sequence[TokenWork]) -> DecodeRows:
        _, batches = self.models[name]
        seats = self._seats[name]
        sources: Ints | None = None
        if self._flight is not None and not self._flight.is_done:
            sources = seats.sources(work)
        return batches.decode_rows(work, sources, seats.targets(work))

    @override
    def _newest(self, handles: Sequence[int]) -> list[int]:
        self.settle()
        return super()._newest(handles)


def _fail(failure: StepFailed) -> StepResult:
    raise failure


def record(
    graphs: Graphs,
    models: Mapping[str, PagedModel],
    layout: Layout,
    pool: torch.Tensor,
    limits: Limits,
) -> None:
    """Let models record their decode steps.

    :param models: by name, without a draft model.
    :param pool: with a large page behind the layout's.
    """
    for name, model in models.items():
        own = layout.seen_by(name)
        pages = sum(_most_entries(group, layout, limits) for group in own.groups)
        tokens = max(group.page_tokens * _num_pages(group, layout) for group in own.groups)
        within = SlotLimits(limits.max_num_seqs, pages, limits.max_model_len, tokens)
        model.capture(graphs, own, pool, within, 2 * limits.max_num_seqs)


def _most_entries(group: GroupSpec, layout: Layout, limits: Limits) -> int:
    """Return the entries of a group's page tables in a recorded step.

    Requests may share every page: twice the pool's pages is enough for most steps.
    """
    of_request = -(-limits.max_model_len // max(1, group.page_tokens))
    return min(limits.max_num_seqs * of_request, 2 * _num_pages(group, layout))


def _num_pages(group: GroupSpec, layout: Layout) -> int:
    return group.pages_per_large * layout.num_large_pages
