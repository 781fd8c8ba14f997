"""Why prefixes missed, as a whole engine core comes to say it."""

from dataclasses import replace

import pytest

from kvell.engine.protocol.messages import Cancel
from kvell.engine.protocol.pages import Miss
from kvell.memory import GroupKind, LayerSpec, Layout, plan_layout
from kvell.vocabulary import RequestId
from tests.engine.conftest import make_layout, make_submit
from tests.engine.core.watched_core import WatchedCore
from tests.engine.works import with_spec

LAYOUT = make_layout((0, 16), 120, page_tokens=4)


def small(num_large: int) -> Layout:
    return make_layout((0,), num_large, page_tokens=4)


def latest(core: WatchedCore) -> Miss:
    return core.core.latest_misses[-1]


def test_a_new_prompt_was_never_seen() -> None:
    core = WatchedCore.over(LAYOUT)
    core.answer("a", range(100))
    assert (latest(core).request_id, latest(core).reason) == ("a", "never_seen")
    assert (latest(core).prompt_tokens, latest(core).hit_tokens) == (100, 0)


def test_a_prompt_that_is_hit_is_no_miss() -> None:
    core = WatchedCore.over(LAYOUT)
    core.answer("a", range(100))
    core.answer("b", range(100))
    assert [miss.request_id for miss in core.core.latest_misses] == ["a"]


def test_the_same_prompt_under_another_salt_is_told_without_its_name() -> None:
    core = WatchedCore.over(LAYOUT)
    core.answer("a", range(100), salt="theirs")
    core.answer("b", range(100), salt="mine")
    assert latest(core).reason == "other_salt"
    assert "theirs" not in repr(latest(core))


def test_what_others_pushed_out_was_evicted() -> None:
    core = WatchedCore.over(small(30))
    core.answer("a", range(100))
    steps = core.core.step
    for number in range(1, 8):
        core.answer(f"b{number}", range(number * 100, number * 100 + 100))
    core.answer("a again", range(100))
    assert latest(core).reason == "evicted"
    assert latest(core).seen_tokens == 96
    assert 0 < latest(core).steps_ago <= core.core.step - steps + 3


def test_a_conversation_that_was_pushed_out_counts_its_answers_as_seen() -> None:
    core = WatchedCore.over(small(40))
    core.answer("a", range(60), 40)
    for number in range(1, 9):
        core.answer(f"b{number}", range(number * 100, number * 100 + 100))
    core.answer("next turn", [*range(60), *[7] * 40, *range(60, 70)])
    assert latest(core).reason == "evicted" and latest(core).seen_tokens == 96


def test_a_window_that_was_given_up_is_why_a_request_cannot_go_on_in_its_middle() -> None:
    core = WatchedCore.over(make_layout((0, 16), 45, page_tokens=4))
    core.answer("a", range(200))
    core.answer("b", [*range(100), *range(300, 340)])
    miss = latest(core)
    assert (miss.reason, miss.groups) == ("not_resumable", ("sliding(16)",))
    assert (miss.hit_tokens, miss.seen_tokens) == (0, 96)


def test_a_window_that_is_still_there_is_resumed_from() -> None:
    core = WatchedCore.over(LAYOUT)
    core.answer("a", range(200))
    core.answer("b", [*range(100), *range(300, 340)])
    assert (latest(core).reason, latest(core).hit_tokens) == ("never_seen", 100)


def test_a_state_that_was_not_kept_is_named() -> None:
    layers = [
        LayerSpec(0, GroupKind.FULL, 1, 8, 2),
        LayerSpec(1, GroupKind.STATE, 0, 0, 2, state_bytes=128),
    ]
    large_bytes = plan_layout(layers, 1 << 20, page_tokens=4).large_page_bytes
    core = WatchedCore.over(plan_layout(layers, large_bytes * 200, page_tokens=4))
    core.answer("a", range(200))
    core.answer("b", [*range(90), *range(300, 340)])
    miss = latest(core)
    assert (miss.reason, miss.groups) == ("not_resumable", ("state",))
    assert miss.hit_tokens < miss.seen_tokens == 80


def test_a_prompt_that_another_is_just_computing_is_not_called_evicted() -> None:
    core = WatchedCore.over(LAYOUT)
    core.submit("a", range(200), 2)
    core.step()  # 64 tokens a step: most of it is not computed yet
    core.core.scheduler.limits = replace(core.core.limits, max_num_batched_tokens=400)
    core.submit("b", range(200), 2)
    while not any(miss.request_id == "b" for miss in core.core.latest_misses):
        core.step()
    miss = latest(core)
    assert miss.request_id == "b" and miss.reason == "being_computed"


def test_a_scored_prompt_is_never_looked_up_and_so_misses_nothing() -> None:
    core = WatchedCore.over(LAYOUT)
    command = make_submit("a", range(100), 2)
    core.core.submit(with_spec(command, sampling=replace(command.spec.sampling, prompt_logprobs=1)))
    core.core.plan()
    assert core.core.latest_misses == ()


def test_a_request_that_was_cancelled_in_the_line_was_not_seen() -> None:
    core = WatchedCore.over(LAYOUT)
    core.submit("a", range(100))
    core.core.cancel(Cancel(RequestId("a")))
    core.answer("b", range(100))
    assert [(m.request_id, m.reason) for m in core.core.latest_misses] == [("b", "never_seen")]


def test_a_preempted_request_is_not_asked_again() -> None:
    core = WatchedCore.over(small(26))
    for number in range(4):
        core.submit(f"r{number}", range(number * 50, number * 50 + 40), 40)
    core.run()
    assert sum(len(plan.preempted) for plan in core.plans) > 0
    names = [miss.request_id for miss in core.core.latest_misses]
    assert sorted(names) == ["r0", "r1", "r2", "r3"]


def test_without_a_watch_there_are_no_misses() -> None:
    core = WatchedCore.over(LAYOUT, watched=False)
    core.answer("a", range(100))
    assert core.core.latest_misses == ()


@pytest.mark.parametrize("depth", [0, 1])
def test_watching_changes_no_plan(depth: int) -> None:
    plans = []
    for watched in (True, False):
        core = WatchedCore.over(small(30), watched=watched, depth=depth)
        for number in range(14):
            start = number % 5 * 20
            core.submit(f"r{number}", range(start, start + 60), 9, "s" * (number % 2))
        core.run()
        plans.append(core.plans)
    assert plans[0] == plans[1]
