"""Prompts of one tenant beside answers of another take a bounded part of each step."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.engine import LEAST_TOKENS, STEP_SECONDS, StepPace
from kvell.engine.planning.chunks import LEAST_PART_TOKENS, RECENT_STEPS
from kvell.engine.requests.plan import StepPlan
from tests.engine.conftest import make_layout, make_submit
from tests.engine.traffic import Traffic, limits, works
from tests.engine.works import with_spec

BOUND = 20
PROMPT = [n % 49 for n in range(40)]


def traffic_of(seats: int = 4) -> Traffic:
    return Traffic(make_layout((0,), 200), limits(batched=64, seats=seats, max_len=80))


def submit(
    traffic: Traffic, name: str, tenant: str, prompt: Sequence[int], answer: int = 30
) -> None:
    traffic.prompts[name] = list(prompt)
    traffic.tell(with_spec(make_submit(name, prompt, answer), tenant=tenant))


def step(traffic: Traffic) -> StepPlan:
    plan = traffic.core.plan(shared_prompt_tokens=BOUND)
    traffic.finish_step(plan)
    return plan


def prompt_tokens(plan: StepPlan, name: str) -> int:
    return sum(count for each, _, count in works(plan) if each == name)


def test_a_prompt_is_cut_while_another_tenant_is_answered() -> None:
    traffic = traffic_of()
    submit(traffic, "b", "tenant", [1, 2, 3])
    step(traffic)
    submit(traffic, "a", "other", PROMPT)
    first = step(traffic)
    assert prompt_tokens(first, "a") == BOUND and prompt_tokens(first, "b") == 1
    traffic.run()
    assert len(traffic.tokens("a")) == len(traffic.tokens("b")) == 30


def test_a_newcomer_is_let_in_beside_a_prompt_and_both_get_their_part() -> None:
    traffic = traffic_of()
    submit(traffic, "a", "other", [n % 7 for n in range(80 - 30)])
    assert prompt_tokens(step(traffic), "a") == 50, "nobody waits"
    submit(traffic, "a2", "other", PROMPT)
    submit(traffic, "a3", "other", PROMPT[::-1])
    submit(traffic, "b", "tenant", [8, *PROMPT])
    plan = step(traffic)
    assert LEAST_PART_TOKENS <= prompt_tokens(plan, "b") <= BOUND
    assert prompt_tokens(plan, "a2") + prompt_tokens(plan, "a3") <= BOUND
    traffic.run()


def test_a_prompt_beside_answers_of_its_tenant_or_none_is_whole() -> None:
    traffic = traffic_of()
    submit(traffic, "b", "tenant", [1, 2, 3])
    assert prompt_tokens(step(traffic), "b") == 3
    submit(traffic, "own", "tenant", PROMPT)
    assert prompt_tokens(step(traffic), "own") == len(PROMPT)


def test_a_tenant_that_was_just_answered_may_come_back() -> None:
    traffic = traffic_of()
    submit(traffic, "b", "tenant", [1, 2, 3], answer=2)
    for _ in range(2):
        step(traffic)
    submit(traffic, "a", "other", PROMPT)
    assert prompt_tokens(step(traffic), "a") == BOUND
    traffic.run()
    for number in range(RECENT_STEPS):  # each answer takes one step
        submit(traffic, f"{number}", "other", [42 + number % 7], answer=1)
        step(traffic)
    submit(traffic, "later", "other", PROMPT[::-1])
    assert prompt_tokens(step(traffic), "later") == len(PROMPT)


@given(
    st.lists(st.tuples(st.integers(1, 2048), st.floats(1e-6, 60)), max_size=20),
    st.floats(1e-6, 0.05),
)
def test_the_pace_follows_the_machine(before: list[tuple[int, float]], token: float) -> None:
    """After steps of one speed, the bound is a step's time at that speed, or the least."""
    pace = StepPace()
    for tokens, seconds in before:
        pace.note(tokens, seconds)
    for _ in range(60):
        pace.note(512, 512 * token)
    due = max(LEAST_TOKENS, int(STEP_SECONDS / token))
    assert abs(pace.shared_prompt_tokens - due) <= 1 + due // 1000


def test_a_slow_step_counts_at_once() -> None:
    pace = StepPace()
    for _ in range(60):
        pace.note(512, 0.01)
    pace.note(512, 512 * STEP_SECONDS / 100)
    assert pace.shared_prompt_tokens in (99, 100)
