"""Depth 1: a step is planned while the one before runs; answers and replays stay the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import replay
from kvell.engine.protocol.messages import Cancel, Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import PENDING, StepResult
from kvell.engine.running.model_part import DrawnBefore, HandleRows, pending
from kvell.memory import create_core
from kvell.pages.layout import GroupKind, GroupSpec
from kvell.vocabulary import RequestId, StepNumber
from tests.depth import few
from tests.engine.conftest import EOS, make_layout, make_submit
from tests.engine.planning.ahead import Ahead, depth_one
from tests.engine.traffic import works
from tests.engine.virtual_model import expected_output
from tests.pages.pools import dropping, group, images, pool_of, state

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
STOP = 7


@pytest.fixture
def ahead() -> Ahead:
    return Ahead(make_layout((0, 9), 40))


def stopping(name: str, prompt: list[int], stop: int = STOP) -> Submit:
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stop,))
    return Submit(RequestSpec(RequestId(name), np.asarray(prompt, "<i4").tobytes(), params))


def test_the_next_step_is_planned_before_the_token_it_computes_is_known(ahead: Ahead) -> None:
    ahead.submit("a", PROMPT)
    first, second = ahead.plan(), ahead.plan()
    assert (works(first), works(second)) == ([("a", 0, 10)], [("a", 10, 1)])
    assert second.work[0].token_ids.tolist() == [PENDING]
    assert [plan.work[0].output_index for plan in (first, second)] == [0, 1]
    with pytest.raises(RuntimeError, match="result of step 1 is missing"):
        ahead.plan()


def test_answers_are_those_of_steps_in_turn(ahead: Ahead) -> None:
    ahead.submit("a", PROMPT, 20)
    ahead.submit("b", PROMPT[::-1], 5)
    ahead.run()
    assert ahead.tokens("a") == expected_output(PROMPT, 20)
    assert ahead.tokens("b") == expected_output(PROMPT[::-1], 5)
    assert ahead.used() == 0


def test_nothing_is_computed_beyond_the_last_token_of_a_known_length(ahead: Ahead) -> None:
    ahead.submit("a", PROMPT, 3)
    ahead.run()
    assert [work for plan in ahead.plans for work in works(plan)] == [
        ("a", 0, 10),
        ("a", 10, 1),
        ("a", 11, 1),
    ]


def test_results_are_committed_in_order(ahead: Ahead) -> None:
    ahead.submit("a", PROMPT)
    ahead.plan()
    second = ahead.plan()
    with pytest.raises(ValueError, match=f"step {second.step} was not asked for"):
        ahead.told.commit(StepResult(second.step, (1,)))


def test_a_stop_token_is_told_at_once_and_the_row_beyond_it_is_dropped(ahead: Ahead) -> None:
    ahead.tell(stopping("a", PROMPT))
    ahead.plan()
    wasted = ahead.plan()
    tokens, finished = ahead.commit(STOP)
    assert tokens == Tokens(RequestId("a"), 0, 0, (STOP,))
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.output_tokens) == ("stop", 1)
    assert works(wasted) == [("a", 10, 1)]
    assert ahead.used() > 0, "the step in flight writes into its pages"
    assert ahead.core.has_work
    assert not ahead.core.may_plan
    assert ahead.commit(3) == []
    assert (ahead.used(), ahead.core.has_work) == (0, False)


def test_a_name_is_free_again_while_its_last_step_is_in_flight(ahead: Ahead) -> None:
    ahead.tell(stopping("a", PROMPT))
    ahead.plan()
    ahead.plan()
    ahead.commit(STOP)
    assert ahead.tell(make_submit("a", PROMPT[::-1], 2)) == []
    fresh = ahead.plan()
    assert works(fresh) == [("a", 0, 10)]
    assert ahead.commit(3) == [], "of the request that has ended"
    ahead.run()
    assert len([e for e in ahead.events if isinstance(e, Finished)]) == 2


def test_a_request_cancelled_in_flight_keeps_its_pages_until_its_last_result(
    ahead: Ahead,
) -> None:
    ahead.submit("a", PROMPT)
    ahead.plan()
    ahead.plan()
    held = ahead.used()
    assert ahead.tell(Cancel(RequestId("a"))) == []
    (event,) = ahead.commit()
    assert isinstance(event, Finished)
    assert (event.reason, event.output_tokens) == ("cancelled", 0)
    assert ahead.used() == held
    assert ahead.commit() == []
    assert ahead.used() == 0


def test_what_the_dropped_row_computed_is_a_prefix_like_any_other(ahead: Ahead) -> None:
    """The stop token's keys are cached: the next turn resumes after it."""
    (stop,) = expected_output(PROMPT, 1)
    ahead.tell(stopping("a", PROMPT, stop))
    ahead.run()
    assert ahead.tokens("a") == [stop]
    ahead.submit("b", [*PROMPT, stop, 1, 2])
    plan = ahead.plan()
    assert works(plan)[0][1] == len(PROMPT) + 1


def test_nobody_is_preempted_before_results_that_may_free_pages() -> None:
    """Six pages: ``long`` gets the page for its thirteenth token from ``short``."""
    tight = Ahead(make_layout((0,), 6))
    tight.submit("long", PROMPT, 8)
    tight.submit("short", PROMPT[::-1], 2)
    tight.run()
    assert not any(plan.preempted for plan in tight.plans)
    assert not tight.plans[3].work, "it waits for a step"
    assert works(tight.plans[4]) == [("long", 12, 1)]
    assert tight.tokens("long") == expected_output(PROMPT, 8)


def test_preemption_waits_until_nothing_is_in_flight() -> None:
    tight = Ahead(make_layout((0,), 8))
    tight.submit("old", PROMPT[:8], 16)
    tight.submit("young", PROMPT[1:], 15)
    owed: list[int] = []
    while tight.core.has_work:
        while tight.core.may_plan:
            if tight.plan().preempted:
                owed.append(len(tight.in_flight) - 1)
        tight.commit()
    assert owed, "nobody was preempted"
    assert not any(owed)
    assert tight.tokens("young") == expected_output(PROMPT[1:], 15)


def test_a_prefix_is_hit_only_when_its_result_is_there(ahead: Ahead) -> None:
    shared = [(i * i) % 49 for i in range(20)]
    ahead.submit("first", [*shared, 1])
    ahead.submit("second", [*shared, 2])
    ahead.plan()
    assert "second" not in [name for name, _, _ in works(ahead.plan())], "its prefix is in flight"
    ahead.run()
    (hit,) = [e for e in ahead.events if isinstance(e, Finished) and e.request_id == "second"]
    assert hit.cached_tokens == 20


traffic = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 12), st.integers(0, 4)),
    min_size=1,
    max_size=10,
)


@few()
@given(traffic, st.sampled_from([3, 8, 32]), st.integers(1, 4))
def test_any_traffic_replays(
    script: list[tuple[int, int, int, int]], batched: int, seats: int
) -> None:
    made = Ahead(make_layout((0, 9), 14), depth_one(max(batched, seats), seats))
    for number, (family, length, max_tokens, steps) in enumerate(script):
        made.submit(f"q{number}", [family] * length, max_tokens)
        for _ in range(steps if made.core.has_work else 0):
            if made.core.has_work:
                made.step()
        if steps == 4:
            made.tell(Cancel(RequestId(f"q{number - 1}")))
    made.run()
    assert replay(made.journal.entries, made.fresh()) == made.plans
    cancelled = {e.request_id for e in made.events if isinstance(e, Finished)} - {
        e.request_id for e in made.events if isinstance(e, Finished) and e.reason == "length"
    }
    for number, (family, length, max_tokens, _) in enumerate(script):
        if f"q{number}" not in cancelled:
            assert made.tokens(f"q{number}") == expected_output([family] * length, max_tokens)


def test_a_token_pending_is_the_last_that_the_step_before_drew(ahead: Ahead) -> None:
    ahead.submit("a", PROMPT)
    first, second = ahead.plan(), ahead.plan()
    (handle,) = {work.handle for plan in (first, second) for work in plan.work}
    assert pending(first.work) == HandleRows((), ())
    assert pending([*first.work, *second.work]) == HandleRows((len(PROMPT),), (handle,))
    before = DrawnBefore()
    before.note(first, StepResult(first.step, (8, 9), (2,)))
    assert before.newest([handle]) == [9]
    with pytest.raises(KeyError):
        before.newest([handle + 1])
    with pytest.raises(KeyError):
        DrawnBefore().newest([handle])


def test_the_newest_tokens_stay_if_the_result_of_an_earlier_step_is_taken_later(
    ahead: Ahead,
) -> None:
    ahead.submit("a", PROMPT)
    first, second = ahead.plan(), ahead.plan()
    (handle,) = {work.handle for plan in (first, second) for work in plan.work}
    before = DrawnBefore()
    before.note(second, StepResult(second.step, (9,)))
    before.note(first, StepResult(first.step, (8,)))
    before.fail(first.step)
    assert before.newest([handle]) == [9]
    before.fail(second.step)
    before.note(first, StepResult(first.step, (8,)))
    assert before.newest([handle]) == [0]


def test_nothing_is_planned_behind_a_step_that_may_have_draft_tokens() -> None:
    drafting = Limits(**{**vars(depth_one(batched=4)), "num_speculative_tokens": 2})
    ahead = Ahead(make_layout((0, 9), 40), drafting)
    ahead.submit("a", PROMPT)
    ahead.plan()
    assert ahead.may_plan(), "a part of a prompt draws nothing"
    ahead.plan()
    ahead.commit()
    ahead.plan()
    assert works(ahead.plans[-1]) == [("a", 8, 2)]
    assert not ahead.may_plan(), "what follows begins with a token and drafts"
    ahead.run()
    assert ahead.tokens("a") == expected_output(PROMPT, 8)


@pytest.mark.parametrize(
    "beside",
    [
        state(1, 2),
        dropping(2, 4, 8),
        images(GroupKind.CROSS, 2, 4),
        images(GroupKind.VISION, 2, 4),
    ],
)
def test_prompts_whose_result_decides_about_pages_are_fences_and_answers_are_not(
    beside: GroupSpec,
) -> None:
    ahead = Ahead(pool_of(40, group(2, 4), beside))
    ahead.submit("a", PROMPT)
    assert ahead.plan().work
    assert not ahead.may_plan()
    ahead.commit(3)
    ahead.plan()
    assert ahead.may_plan()
    ahead.plan()
    ahead.commit(4)
    assert ahead.tokens("a") == [3, 4]


def test_text_is_planned_ahead_from_the_first_chunk(ahead: Ahead) -> None:
    ahead.submit("a", PROMPT * 3)
    ahead.plan()
    assert ahead.may_plan()


@pytest.mark.parametrize("depth", [-1, 2])
def test_a_depth_that_nobody_can_plan_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth={depth}"):
        EngineCore(create_core(make_layout((0,))), Limits(depth=depth), frozenset({EOS}))


def test_steps_have_numbers_in_order(ahead: Ahead) -> None:
    ahead.submit("a", PROMPT, 3)
    ahead.run()
    assert [plan.step for plan in ahead.plans] == [StepNumber(n + 1) for n in range(3)]
