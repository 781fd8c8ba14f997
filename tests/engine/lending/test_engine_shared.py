"""Requests behind sections lent to another over the same text, and creditors that are asked."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from kvell.engine.core.page_map import PageMap
from kvell.engine.lending.borrowing_requests import JOIN_TICKS
from kvell.engine.lending.distributed_request import MOST_LATE_STEPS, repeats
from kvell.engine.lending.placement import RETRY_TICKS
from kvell.memory import VisibleCore
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
from tests.engine.lending.placing import LARGE, PROMPT, answered, placed, starts
from tests.engine.moving.handing_over import SECTION_TOKENS, Cluster, Entry
from tests.engine.moving.machine import MIXES, NAMES, cluster_of, prompt_of
from tests.models.cases import covering
from tests.pages.pools import state

SAME = "same"
TO_BOTH = (("p", 4), ("d", 5), ("e", 5))
AWAY = 10
"""Sections of the prompt that are elsewhere once its answer begins."""


def begun(max_tokens: int = 22, *, by_queries: bool = False) -> Cluster:
    """A request of 90 tokens in pools of 48, most of which lies at two creditors."""
    cluster = cluster_of("full", LARGE, by_queries=by_queries)
    entry = Entry(PROMPT, max_tokens, "", placement=TO_BOTH)
    cluster.submit("r", entry, "p", "")
    run(cluster, lambda: answered(cluster) and away(cluster.instances["p"]) >= AWAY)
    return cluster


def again(
    cluster: Cluster, prompt: Sequence[int] = PROMPT, max_tokens: int = 6, salt: str = ""
) -> Entry:
    entry = Entry(list(prompt), max_tokens, salt, placement=TO_BOTH)
    cluster.submit(SAME, entry, "p", "")
    return entry


def in_time(cluster: Cluster, until: Callable[[], bool]) -> None:
    """Let everything go on, and time pass while nobody can."""
    for _ in range(400):
        if until():
            return
        turn(cluster)
        if not any(cluster.works(name) for name in NAMES):
            cluster.pass_time(RETRY_TICKS)
    raise AssertionError("it never happened")


def shared(cluster: Cluster) -> int:
    return cluster.instances["p"].handovers.borrowed.tally()["shared"]


def computed(cluster: Cluster) -> int:
    return cluster.instances["p"].model.tokens_computed


def pages_lent(cluster: Cluster) -> int:
    lending = [cluster.instances[name].handovers.agent.lending for name in NAMES]
    return sum(len(one.page_rows()) for one in lending)


@pytest.mark.parametrize("by_queries", [False, True])
def test_a_second_request_reads_what_is_lent_already(by_queries: bool) -> None:
    cluster = begun(by_queries=by_queries)
    before, pages = computed(cluster), pages_lent(cluster)
    same = again(cluster)
    run(cluster, lambda: bool(same.emitted))
    assert cluster.entries["r"].end is None, "both go on"
    assert shared(cluster) >= AWAY
    assert starts(cluster, name=SAME)[0] == shared(cluster) * SECTION_TOKENS
    assert computed(cluster) - before < 40 < len(PROMPT)
    assert pages_lent(cluster) <= pages + 4, "no section was lent twice"
    end(cluster)
    assert same.end is not None and same.end.cached_tokens == shared(cluster) * SECTION_TOKENS


def test_a_creditor_shows_which_of_its_pages_are_lent() -> None:
    cluster = begun()
    for name in ("d", "e"):
        instance = cluster.instances[name]
        pages = PageMap(instance.core, cast(VisibleCore, instance.core.memory)).pages(1)
        lent, used = np.frombuffer(pages.lent, "<u4"), np.frombuffer(pages.used, "<u4")
        assert lent.sum() == len(instance.handovers.agent.lending.page_rows()) > 0
        assert len(lent) == len(used) and (lent <= used).all()
    end(cluster)
    assert pages_lent(cluster) == 0


@pytest.mark.parametrize(("mine", "its"), [(2, 22), (22, 8)])
def test_it_matters_to_nobody_which_of_them_ends_first(mine: int, its: int) -> None:
    cluster = begun(max_tokens=its)
    same = again(cluster, max_tokens=mine)
    run(cluster, lambda: bool(cluster.entries["r"].end) != bool(same.end))
    assert bool(same.end) == (mine < its)
    end(cluster)
    assert shared(cluster) >= AWAY and len(same.emitted) == mine


def test_a_third_one_shares_with_the_second() -> None:
    """The first has ended, and its loans were given back."""
    cluster = begun(max_tokens=8)
    again(cluster, max_tokens=22)
    run(cluster, lambda: cluster.entries["r"].end is not None)
    third = Entry(PROMPT, 5, "", placement=TO_BOTH)
    cluster.submit("third", third, "p", "")
    run(cluster, lambda: third.end is not None)
    assert starts(cluster, name="third")[0] >= AWAY * SECTION_TOKENS
    end(cluster)


def test_a_text_that_goes_on_otherwise_shares_what_it_has_in_common() -> None:
    cluster = begun()
    common = 5 * SECTION_TOKENS + 3
    other = [*PROMPT[:common], *((token + 1) % 50 for token in PROMPT[common:])]
    same = again(cluster, other)
    in_time(cluster, lambda: bool(same.emitted))
    assert shared(cluster) == 5
    assert starts(cluster, name=SAME)[0] == 5 * SECTION_TOKENS
    end(cluster)


@pytest.mark.parametrize(("prompt", "salt"), [(PROMPT, "other"), (prompt_of(2, 90), "")])
def test_who_has_another_text_shares_nothing(prompt: list[int], salt: str) -> None:
    cluster = begun(max_tokens=4)
    same = again(cluster, prompt, salt=salt)
    in_time(cluster, lambda: bool(same.end))
    assert shared(cluster) == 0 and starts(cluster, name=SAME)[0] == 0
    end(cluster)


def test_what_is_cached_here_is_not_read_elsewhere() -> None:
    """The pages that went are still in the cache, since nobody has needed them."""
    cluster = placed(max_tokens=12, large=30)
    run(cluster, lambda: answered(cluster) and away(cluster.instances["p"]) >= 9)
    same = again(cluster)
    run(cluster, lambda: bool(same.emitted))
    assert shared(cluster) == 0 and starts(cluster, name=SAME)[0] > 9 * SECTION_TOKENS
    end(cluster)


def test_a_prompt_that_ends_with_a_section_computes_its_last_token() -> None:
    cluster = begun()
    same = again(cluster, PROMPT[: 6 * SECTION_TOKENS])
    run(cluster, lambda: bool(same.emitted))
    assert shared(cluster) == 5
    end(cluster)


def test_who_is_not_answered_in_time_begins_without() -> None:
    cluster = begun(max_tokens=4)
    same = again(cluster)
    cluster.messages.clear()
    debtor = cluster.instances["p"]
    assert len(debtor.core.running) == 1 and len(debtor.core.requests) == 2
    deadline = debtor.handovers.next_deadline
    assert deadline is not None and deadline <= cluster.now + JOIN_TICKS
    cluster.pass_time(JOIN_TICKS + 1)
    in_time(cluster, lambda: bool(same.end))
    assert shared(cluster) == 0 and starts(cluster, name=SAME)[0] == 0
    end(cluster)


def test_what_is_there_counts_where_a_later_part_is_not() -> None:
    """One of two creditors is silent: the first sections are gone on behind."""
    cluster = begun()
    same = again(cluster)
    cluster.messages[:] = [one for one in cluster.messages if one[2] != "e"]
    while cluster.messages:
        cluster.deliver(0)
    cluster.pass_time(JOIN_TICKS + 1)
    in_time(cluster, lambda: bool(same.emitted))
    assert shared(cluster) == 5 and starts(cluster, name=SAME)[0] == 5 * SECTION_TOKENS
    end(cluster)


def test_a_request_that_is_cancelled_while_it_joins_gives_back() -> None:
    cluster = begun()
    before = lent(cluster) + lent(cluster, "e")
    again(cluster)
    for _ in range(6):
        cluster.deliver(0)
    assert lent(cluster) + lent(cluster, "e") > before
    cluster.cancel(SAME)
    while cluster.messages:
        cluster.deliver(0)
    assert lent(cluster) + lent(cluster, "e") == before
    end(cluster)


def test_a_recall_is_heard_by_both() -> None:
    """The creditor's own prompt needs the memory."""
    cluster = begun(max_tokens=6)
    same = again(cluster)
    run(cluster, lambda: bool(same.emitted))
    before = pages_lent(cluster)
    own = Entry(prompt_of(2, 30), 4, "")
    cluster.submit("own", own, "d", "")
    run(cluster, lambda: pages_lent(cluster) < before)
    end(cluster)
    assert len(own.emitted) == 4 and len(same.emitted) == 6


@covering({"after": range(0, 24, 3), "dies": NAMES, "by_queries": [False, True]}, together=1)
def test_a_death_at_any_moment(dies: str, after: int, by_queries: bool) -> None:
    cluster = begun(by_queries=by_queries)
    again(cluster)
    for _ in range(after):
        if cluster.messages:
            cluster.deliver(0)
        else:
            turn(cluster)
    cluster.crash(dies)
    end(cluster)
    for name in ("r", SAME):
        ended = cluster.entries[name].end
        assert ended is not None and (ended.reason == "length" or ended.try_later)


def test_nobody_shares_where_nothing_is_lent() -> None:
    cluster = placed(large=30)
    same = again(cluster)
    run(cluster, lambda: bool(same.end))
    assert shared(cluster) == 0
    end(cluster)


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
