"""Plans are equal when they would do the same."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import PageCopy, StepPlan, TokenWork
from kvell.vocabulary import PageId, RequestId, StepNumber
from tests.engine.works import work_of

GREEDY = SamplingParams(temperature=0)


def work(start: int = 4, tokens: tuple[int, ...] = (7, 8)) -> TokenWork:
    return work_of("a", 1, start, len(tokens), np.asarray(tokens, np.int32), GREEDY)


def plan() -> StepPlan:
    return StepPlan(
        StepNumber(3),
        released=(9,),
        new_pages=np.asarray([[1, 0, 0, 5]], np.int32),
        work=(work(), structs.replace(work(9), samples=False)),
    )


def test_equal_content_makes_equal_plans_and_hashes() -> None:
    assert plan() == plan()
    assert hash(plan()) == hash(plan())
    assert work() == work()
    assert hash(work()) == hash(work())


@pytest.mark.parametrize(
    "changed",
    [
        replace(plan(), step=StepNumber(4)),
        replace(plan(), released=()),
        replace(plan(), new_pages=np.asarray([[1, 0, 0, 6]], np.int32)),
        replace(plan(), new_pages=np.empty((0, 4), np.int32)),
        replace(plan(), work=(work(),)),
        replace(plan(), work=(work(tokens=(7, 9)), plan().work[1])),
        replace(plan(), copies=(PageCopy(0, PageId(1), PageId(2)),)),
        replace(plan(), checkpoints=np.asarray([[1, 0, 64, 0, 5]], np.int32)),
        replace(plan(), preempted=(RequestId("b"),)),
        replace(plan(), admitted=(RequestId("a"),)),
    ],
)
def test_a_plan_that_would_do_something_else_is_another(changed: StepPlan) -> None:
    assert plan() != changed


@pytest.mark.parametrize(
    "changed",
    [
        structs.replace(work(), handle=2),
        structs.replace(work(), start=5),
        structs.replace(work(), samples=False),
        structs.replace(work(), output_index=1),
        structs.replace(work(), cuts=(5,)),
        structs.replace(work(), token_ids=np.asarray((7, 8, 9), np.int32)),
    ],
)
def test_other_work_is_other_work(changed: TokenWork) -> None:
    assert work() != changed


def test_neither_is_equal_to_something_else() -> None:
    assert plan() != "plan"
    assert work() != plan()


def test_a_plan_counts_its_tokens_and_work_knows_whether_it_samples() -> None:
    assert plan().num_tokens == 4
    assert [w.samples for w in plan().work] == [True, False]


def test_an_idle_plan_touches_nothing() -> None:
    idle = StepPlan(StepNumber(1))
    assert idle.num_tokens == 0
    assert idle.new_pages.shape == (0, 4)
    assert idle.new_pages.dtype == np.int32
