"""Requests whose creditors are asked for attention over what they lend, as over a connection."""

from dataclasses import replace

import pytest

from kvell.engine.lending.distributed_request import MOST_LATE_STEPS, repeats
from tests.engine.lending.borrowing import (
    NAME,
    SECTIONS,
    asking,
    away,
    end,
    lent,
    preemptions,
    run,
    start,
    turn,
    whole_pool,
)
from tests.engine.moving.handing_over import SECTION_TOKENS
from tests.engine.moving.machine import MIXES
from tests.pages.pools import state


def test_plans_name_every_section_and_no_page_of_others() -> None:
    cluster = asking()
    turn(cluster)
    debtor = cluster.instances["p"]
    plan = debtor.plans[-1]
    assert [one.by_queries for one in plan.borrowed] == [True] * SECTIONS
    assert len({one.right for one in plan.borrowed}) == SECTIONS
    (group,) = cluster.layout.groups
    own = cluster.layout.num_large_pages * group.pages_per_large
    assert all((plan.new_pages[:, 3] < own).all() for plan in debtor.plans)
    end(cluster)
    assert preemptions(cluster) == 0


@pytest.mark.parametrize("late", range(1, MOST_LATE_STEPS + 1))
def test_who_is_late_is_asked_again(late: int) -> None:
    """A step without its answer takes no token, and nothing is computed anew."""
    cluster = asking()
    debtor, creditor = cluster.instances["p"], cluster.instances["d"]
    said = len(cluster.entries[NAME].emitted)
    creditor.answers = False
    for _ in range(late):
        cluster.step("p")
    assert len(cluster.entries[NAME].emitted) == said and away(debtor) == SECTIONS
    creditor.answers = True
    cluster.step("p")
    assert len(cluster.entries[NAME].emitted) == said + 1
    creditor.answers = False
    for _ in range(late):  # it is counted from the start again
        cluster.step("p")
    assert away(debtor) == SECTIONS
    creditor.answers = True
    end(cluster)
    assert preemptions(cluster) == 0


def test_what_a_silent_creditor_lends_is_computed_anew() -> None:
    cluster = asking()
    debtor, creditor = cluster.instances["p"], cluster.instances["d"]
    creditor.answers = False
    for _ in range(MOST_LATE_STEPS + 1):
        cluster.step("p")
    assert away(debtor) == 0 and cluster.entries[NAME].end is None
    end(cluster)
    assert preemptions(cluster) == 1 and lent(cluster) == 0


@pytest.mark.parametrize("mix", list(MIXES))
def test_every_group_is_computed_again_after_a_late_answer(mix: str) -> None:
    cluster = asking(mix=mix)
    cluster.instances["d"].answers = False
    cluster.step("p")
    cluster.instances["d"].answers = True
    end(cluster)
    assert preemptions(cluster) == 0


def test_a_step_that_moved_a_state_is_not_repeated() -> None:
    full, states = MIXES["full"][0], state(2, 1)
    assert repeats("", [full]) and not repeats("", [full, states])
    assert repeats("", [full, replace(states, model="another")])


def test_what_is_wanted_back_is_computed_anew_behind_what_stays() -> None:
    cluster = asking(max_tokens=20, large=10)
    debtor = cluster.instances["p"]
    own = whole_pool(cluster)
    cluster.submit("own", own, "d", "")
    run(cluster, lambda: lent(cluster) < SECTIONS)
    computed = debtor.model.tokens_computed
    end(cluster)
    assert len(own.emitted) == own.max_tokens
    ended = cluster.entries[NAME]
    anew = debtor.model.tokens_computed - computed
    assert preemptions(cluster) >= 1
    assert anew < len(ended.prompt) + ended.max_tokens, "the first sections stayed"
    (group,) = cluster.layout.groups
    pages = cluster.layout.num_large_pages * group.pages_per_large
    copies = [copy for plan in debtor.plans for copy in plan.copies]
    assert all(copy.source < pages for copy in copies), "nothing comes over a connection"
    assert len(ended.prompt) > SECTION_TOKENS * SECTIONS


def test_two_creditors_and_one_of_them_dies() -> None:
    cluster = start(by_queries=True)
    debtor = cluster.instances["p"]
    for section in range(SECTIONS):
        cluster.lend(NAME, 1, "de"[section % 2])
    run(cluster, lambda: away(debtor) == SECTIONS)
    cluster.crash("e")
    cluster.step("p")
    assert away(debtor) <= 1, "what came before its first section stays"
    end(cluster)
    assert lent(cluster, "d") == lent(cluster, "e") == 0
