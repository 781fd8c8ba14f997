"""Steps on a device that computes one while the next is planned and started; no second thread.

::

    loop     plan 1 start 1 │ plan 2 start 2 │ wait 1, commit 1 │ plan 3 start 3 │ wait 2 …
    device          [copy, step 1 ][copy, step 2 .............................][copy, step 3 …

A recorded step reads the tokens of the one before from their seats.  A step that is computed needs
them on the host, and so waits.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial

from typing_extensions import override

from kvell.engine.failing.failures import StepFailed
from kvell.engine.requests.plan import StepPlan, StepResult, TokenWork
from kvell.engine.running.batching import Ints
from kvell.engine.running.recorded.seats import DeviceSeats
from kvell.engine.running.runner import ModelRunner
from kvell.models.captured.slots import DecodeRows


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
    """Models on a device that records their decode steps."""

    _flight: Flight | None = None

    @cached_property
    def _seats(self) -> dict[str, DeviceSeats]:
        return {
            name: DeviceSeats(model.captured.num_seats)
            for name, (model, _) in self._models.items()
            if model.captured is not None
        }

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Give the device a step; return a function that waits for its result."""
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
        if self._flight is not None:
            self._flight.settle()

    def device_steps(self) -> dict[str, int]:
        passes = [model.captured for model, _ in self._models.values()]
        counts = sum((each.counts for each in passes if each is not None), Counter[str]())
        return dict(counts)

    def _follow(self) -> None:
        for model, _ in self._models.values():
            if model.captured is not None:
                model.captured.follow()

    @override
    def _decode_rows(self, name: str, work: Sequence[TokenWork]) -> DecodeRows:
        _, batches = self._models[name]
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
