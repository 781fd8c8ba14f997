"""Tenants beside each other once they are let in: who gives way, and to whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.vocabulary import RequestId
from tests.depth import some
from tests.engine.conftest import make_layout, make_submit
from tests.engine.traffic import Traffic, limits, text
from tests.engine.works import with_spec

FULL = (0,)
PAGE = 4


def submit(
    traffic: Traffic, name: str, length: int, max_tokens: int, *, tenant: str, priority: int = 0
) -> None:
    prompt = text(len(traffic.prompts), length)
    traffic.prompts[name] = prompt
    command = make_submit(name, prompt, max_tokens)
    traffic.tell(with_spec(command, tenant=tenant, group=name, priority=priority))


def steps_until_let_in(traffic: Traffic, name: str, most: int = 200) -> int:
    for count in range(1, most + 1):
        plan = traffic.plan()
        traffic.finish_step(plan)
        if name in plan.admitted:
            return count
    raise AssertionError(f"{name} was not let in within {most} steps")


def running(traffic: Traffic) -> list[str]:
    return [str(one.request_id) for one in traffic.core.running]


def test_who_has_all_seats_gives_one_back() -> None:
    traffic = Traffic(make_layout(FULL, 200), limits(seats=4))
    for n in range(4):
        submit(traffic, f"a{n}", 4, 40, tenant="a")
    traffic.step()
    traffic.step()
    submit(traffic, "b", 4, 2, tenant="b")
    assert steps_until_let_in(traffic, "b") <= 2
    assert running(traffic) == ["a0", "a1", "a2", "b"], "the youngest of a's made way"
    assert steps_until_let_in(traffic, "a3") <= 3, "it comes back when b's has ended"
    traffic.run()
    assert traffic.finished("a3").preemptions == 1


def test_seats_come_to_be_alike_and_stay() -> None:
    traffic = Traffic(make_layout(FULL, 400), limits(seats=6))
    for n in range(9):
        submit(traffic, f"a{n}", 4, 40, tenant="a")
    traffic.step()
    traffic.step()
    for n in range(9):
        submit(traffic, f"b{n}", 4, 40, tenant="b")
    for _ in range(8):
        traffic.step()
    assert sorted(name[0] for name in running(traffic)) == [*"aaabbb"]
    assert traffic.rung("preempt") == 3
    traffic.step()
    assert traffic.rung("preempt") == 3


def test_who_has_all_memory_makes_room() -> None:
    """a's three answers grow to no more than the pages; b's would wait for the end of one."""
    traffic = Traffic(make_layout(FULL, 30), limits(seats=8))
    for n in range(3):
        submit(traffic, f"a{n}", 36, 4, tenant="a")
    traffic.step()
    while len(running(traffic)) < 3:
        traffic.step()
    submit(traffic, "b", 8, 3, tenant="b")
    assert steps_until_let_in(traffic, "b") <= 3
    traffic.run()


@pytest.mark.parametrize(
    ("tenant", "priority", "makes_way"),
    [("b", 0, True), ("b", 1, False), ("b", -1, True), ("a", 0, False), ("a", -1, False)],
)
def test_nobody_makes_way_for_its_own_or_for_less_urgent_ones(
    tenant: str, priority: int, makes_way: bool
) -> None:
    traffic = Traffic(make_layout(FULL, 200), limits(seats=2))
    for n in range(2):
        submit(traffic, f"a{n}", 4, 20, tenant="a")
    traffic.step()
    traffic.step()
    submit(traffic, "late", 4, 2, tenant=tenant, priority=priority)
    assert (steps_until_let_in(traffic, "late") <= 2) == makes_way


def test_who_has_only_begun_makes_its_start_worth_it_first_but_for_a_newcomer() -> None:
    traffic = Traffic(make_layout(FULL, 400), limits(seats=5, batched=64, max_len=64))
    for n in range(5):
        submit(traffic, f"a{n}", 40, 20, tenant="a")
    while len(running(traffic)) < 5:
        traffic.step()
    submit(traffic, "b0", 4, 40, tenant="b")
    submit(traffic, "b1", 4, 2, tenant="b")
    assert steps_until_let_in(traffic, "b0") <= 2
    steps_until_let_in(traffic, "b1")
    [_, later] = [name for plan in traffic.plans for name in plan.preempted]
    assert len(traffic.tokens(later)) >= 40 // 8


def test_a_newcomer_leaves_the_oldest_request_its_prompt() -> None:
    traffic = Traffic(make_layout(FULL, 400), limits(seats=1, batched=4, max_len=64))
    submit(traffic, "a", 40, 8, tenant="a")
    traffic.step()
    for n in range(20):
        submit(traffic, f"b{n}", 4, 1, tenant="b")
    while not traffic.tokens("a"):
        assert "a" in running(traffic)
        traffic.step()
    traffic.run()


def test_who_is_preempted_waits_in_its_own_tenants_line() -> None:
    """a thrashes in too little memory; b's short ones come in between all the time."""
    traffic = Traffic(make_layout(FULL, 24), limits(seats=8))
    for n in range(8):
        submit(traffic, f"a{n}", 4, 40, tenant="a")
    while not traffic.rung("preempt"):
        traffic.step()
    for n in range(5):
        submit(traffic, f"b{n}", 4, 2, tenant="b")
        assert steps_until_let_in(traffic, f"b{n}") <= 12
    traffic.run(4000)
    assert all(traffic.finished(f"b{n}").preemptions == 0 for n in range(5))


def test_output_counts_for_whose_turn_it_is() -> None:
    """Each of a's answers is ten times as long: b has its turns more often."""
    traffic = Traffic(make_layout(FULL, 200), limits(seats=1))
    for n in range(4):
        submit(traffic, f"a{n}", 4, 50, tenant="a")
    for n in range(20):
        submit(traffic, f"b{n}", 4, 5, tenant="b")
    traffic.run(2000)
    admitted = [name for plan in traffic.plans for name in plan.admitted]
    assert [name[0] for name in admitted[:14]].count("a") <= 3


@some()
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 24), st.integers(1, 30), st.integers(0, 9)
        ),
        min_size=2,
        max_size=12,
    ),
    st.integers(18, 60),
    st.integers(1, 5),
)
def test_every_mix_comes_to_its_end_with_the_right_answers(
    asked: list[tuple[str, int, int, int]], pages: int, seats: int
) -> None:
    traffic = Traffic(make_layout(FULL, pages), limits(seats=seats))
    for number, (tenant, length, max_tokens, steps) in enumerate(asked):
        submit(traffic, f"{tenant}{number}", length, max_tokens, tenant=tenant)
        for _ in range(steps):
            if traffic.core.has_work:
                traffic.step()
    traffic.run(4000)
    ends = [traffic.finished(str(RequestId(name))) for name in traffic.prompts]
    assert all(one.reason in ("stop", "length") for one in ends)
