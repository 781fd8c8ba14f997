"""Steps run in order on their own thread; a result arrives when the next step computes."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event

import numpy as np
import pytest
import torch

from kvell.engine.engine import StepsAhead
from kvell.engine.protocol.pooling import POOLED, vector_of
from kvell.engine.requests.plan import StepResult, TokenWork
from kvell.engine.running.model_part import NO_ROWS, HandleRows, pooled_rows
from kvell.vocabulary import StepNumber
from tests.engine.works import work_of

SOON = 10.0
"""Seconds to wait for a thread before a test fails."""


class Steps:
    """Steps that begin to compute and end on command."""

    def __init__(self) -> None:
        self.ahead = StepsAhead()
        self.entered: dict[int, Event] = {}
        self.computing: dict[int, Event] = {}
        self._may_begin: dict[int, Event] = {}
        self._may_end: dict[int, Event] = {}
        self.ran: list[int] = []

    def ask(self, step: int, failure: Exception | None = None) -> Future[StepResult]:
        marks = (self.entered, self.computing, self._may_begin, self._may_end)
        for events in marks:
            events[step] = Event()
        return self.ahead.ask(self._run_of(step, failure))

    def begin(self, step: int) -> None:
        self._may_begin[step].set()
        assert self.computing[step].wait(SOON)

    def end(self, step: int) -> None:
        self._may_end[step].set()

    def _run_of(self, step: int, failure: Exception | None) -> Callable[[], StepResult]:
        def run() -> StepResult:
            self.entered[step].set()
            assert self._may_begin[step].wait(SOON)
            if failure is not None:
                raise failure
            self.ahead.begun()
            self.computing[step].set()
            assert self._may_end[step].wait(SOON)
            self.ran.append(step)
            return StepResult(StepNumber(step), (step,))

        return run


def test_a_step_that_nobody_follows_gives_its_result_at_once() -> None:
    steps = Steps()
    first = steps.ask(1)
    steps.begin(1)
    assert not first.done()
    steps.end(1)
    assert first.result(SOON).token_ids == (1,)


def test_a_result_waits_until_the_next_step_computes() -> None:
    steps = Steps()
    first, second = steps.ask(1), steps.ask(2)
    steps.begin(1)
    steps.end(1)
    assert steps.entered[2].wait(SOON)
    assert steps.ran == [1]
    assert not first.done(), "the second has not begun to compute"
    steps.begin(2)
    assert first.result(SOON).token_ids == (1,)
    assert not second.done()
    steps.end(2)
    assert second.result(SOON).token_ids == (2,)


def test_a_step_with_nothing_to_compute_holds_nobody_up() -> None:
    """It never says that it has begun."""
    ahead, go = StepsAhead(), Event()

    def idle(step: int) -> Callable[[], StepResult]:
        def run() -> StepResult:
            assert go.wait(SOON)
            return StepResult(StepNumber(step), ())

        return run

    answers = [ahead.ask(idle(step)) for step in range(4)]
    go.set()
    assert [answer.result(SOON).step for answer in answers] == [0, 1, 2, 3]


def test_a_failure_comes_behind_the_result_before_it() -> None:
    steps = Steps()
    first, second = steps.ask(1), steps.ask(2, MemoryError("the device is full"))
    third = steps.ask(3)
    steps.begin(1)
    steps.end(1)
    steps._may_begin[2].set()
    assert first.result(SOON).token_ids == (1,)
    with pytest.raises(MemoryError, match="device is full"):
        second.result(SOON)
    steps.begin(3)
    steps.end(3)
    assert third.result(SOON).token_ids == (3,)
    assert steps.ran == [1, 3]


def work(
    handle: int, count: int, *, samples: bool = True, pools: bool = False, scores: bool = False
) -> TokenWork:
    return work_of(
        f"r{handle}",
        handle,
        0,
        count,
        sampling=POOLED if samples else None,
        prompt_tokens=count + 1,
        scores=0 if scores else None,
        pools=pools,
    )


def test_the_last_row_of_each_work_that_pools() -> None:
    step = [
        work(1, 1),
        work(2, 9, pools=True),
        work(3, 5, samples=False),
        work(4, 4, scores=True),
        work(5, 1, pools=True),
        work(6, 2, samples=False, scores=True),
        work(7, 3, pools=True),
    ]
    assert sum(one.num_logits for one in step) == 10
    assert pooled_rows(step) == HandleRows((1, 6, 9), (2, 5, 7))


def test_answers_alone_give_none() -> None:
    assert pooled_rows([work(1, 1), work(2, 7)]) == NO_ROWS == HandleRows()
    assert pooled_rows([]) == NO_ROWS


def test_vectors_have_length_one_whatever_they_were() -> None:
    hidden = torch.tensor([[3.0, 4.0], [1e30, 0.0], [0.0, 0.0], [0.0, -2e-5]])
    told = HandleRows((0, 1, 2, 3), (10, 11, 12, 13)).vectors(hidden)
    vectors = {handle: vector_of(data).tolist() for handle, data in told.items()}
    assert np.allclose(vectors[10], [0.6, 0.8])
    assert vectors[12] == [0.0, 0.0], "nothing has no direction"
    assert np.allclose(vectors[13], [0.0, -1.0])


def test_16_bits_are_scaled_in_32() -> None:
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    [data] = HandleRows((1,), (9,)).vectors(hidden).values()
    expected = hidden[1].double() / hidden[1].double().norm()
    assert np.allclose(vector_of(data), expected.numpy(), atol=1e-7)
