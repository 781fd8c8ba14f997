"""Requests whose first sections lie at other instances, over pages that can be read back."""

from dataclasses import replace
from typing import Any

import pytest

from kvell.engine.lending.distributed_request import local_reason
from kvell.mempool.entries import PeerLost, Ticked
from kvell.pages.layout import GroupKind
from tests.engine.lending.borrowing import (
    NAME,
    PROMPT,
    SECTIONS,
    Lending,
    away,
    end,
    lent,
    preemptions,
    run,
    start,
    turn,
    whole_pool,
)
from tests.engine.moving.handing_over import SECTION_TOKENS, Entry
from tests.engine.moving.machine import MIXES, SOME, cluster_of, prompt_of
from tests.engine.virtual_model import expected_output
from tests.models.cases import covering


@pytest.mark.parametrize("by_queries", [False, True])
@pytest.mark.parametrize("mix", list(MIXES))
def test_sections_are_read_where_they_went(mix: str, by_queries: bool) -> None:
    cluster = start(mix, by_queries=by_queries)
    debtor = cluster.instances["p"]
    cluster.lend(NAME, 3, "d")
    run(cluster, lambda: away(debtor) == 3)
    before = debtor.model.borrowed_reads
    turn(cluster)
    assert debtor.model.borrowed_reads > before
    assert lent(cluster) == 3 and lent(cluster, "e") == 0
    end(cluster)
    assert cluster.entries[NAME].attempt == 0
    assert preemptions(cluster) == 0
    assert lent(cluster) == 0


def test_what_is_away_takes_no_memory_here() -> None:
    cluster = start()
    debtor = cluster.instances["p"]
    held = [len(debtor.core.memory.held_pages(debtor.core.running[0].handle))]
    cluster.lend(NAME, SECTIONS, "d")
    run(cluster, lambda: away(debtor) == SECTIONS)
    held.append(len(debtor.core.memory.held_pages(debtor.core.running[0].handle)))
    (group,) = debtor.core.memory.layout.groups
    assert held[0] - held[1] >= SECTIONS * SECTION_TOKENS // group.page_tokens - 1
    end(cluster)


def test_two_creditors_have_parts_of_one_request() -> None:
    cluster = start()
    debtor = cluster.instances["p"]
    for section in range(SECTIONS):
        cluster.lend(NAME, 1, "de"[section % 2])
    run(cluster, lambda: away(debtor) == SECTIONS)
    assert lent(cluster, "d") == lent(cluster, "e") == SECTIONS // 2
    end(cluster)


def test_sections_go_as_they_are_computed() -> None:
    """The prompt's and the answer's; those that a step still writes stay."""
    cluster = cluster_of("windows")
    cluster.submit(NAME, Entry(PROMPT, 20, ""), "p", "")
    cluster.step("p")
    cluster.lend(NAME, 99, "d")
    debtor = cluster.instances["p"]
    seen = set()
    for _ in range(200):
        turn(cluster)
        seen.add(away(debtor))
        if cluster.entries[NAME].end:
            break
    assert seen >= {1, 2, 3, 4, 5, 6}, "57 tokens have 7 sections, the last of which is written"
    end(cluster)


def test_a_recall_brings_sections_home() -> None:
    """The creditor's own prompt needs the memory."""
    cluster = start(max_tokens=20, large=10)
    debtor, creditor = cluster.instances["p"], cluster.instances["d"]
    cluster.lend(NAME, SECTIONS, "d")
    run(cluster, lambda: away(debtor) == SECTIONS)
    own = whole_pool(cluster)
    cluster.submit("own", own, "d", "")
    run(cluster, lambda: lent(cluster) < SECTIONS)
    assert 0 < away(debtor) < SECTIONS and cluster.entries[NAME].end is None
    end(cluster)
    assert len(own.emitted) == own.max_tokens
    assert preemptions(cluster) == 0, "it came home, and nothing was lost"
    assert len(creditor.core.running) == 0


def test_a_recall_that_finds_a_section_on_its_way_makes_nothing_be_computed_anew() -> None:
    """Only what is read elsewhere is copied home; nobody reads the one that is asked for."""
    cluster = start(max_tokens=20)
    debtor, creditor = cluster.instances["p"], cluster.instances["d"]
    cluster.lend(NAME, 2, "d")
    run(cluster, lambda: away(debtor) == 2)
    cluster.lend(NAME, 1, "d")
    asked = cluster.messages.pop()
    lending = creditor.handovers.agent.lending
    cluster.act(creditor, lending.recall([1] * len(cluster.layout.groups), cluster.now, 2_000))
    cluster.deliver(-1)
    cluster.step("p")
    assert away(debtor) == 1
    cluster.messages.append(asked)
    end(cluster)
    assert preemptions(cluster) == 0
    assert debtor.handovers.borrowed.tally() == {
        "borrowed": 0,
        "returned": 1,
        "replaced": 0,
        "shared": 0,
        "lost": 0,
    }


def test_a_creditor_that_needs_it_takes_it_from_a_debtor_that_is_silent() -> None:
    """The debtor does not hear the recall: its right goes at the deadline, and it computes anew."""
    cluster = start(max_tokens=20, large=10)
    debtor = cluster.instances["p"]
    cluster.lend(NAME, SECTIONS, "d")
    run(cluster, lambda: away(debtor) == SECTIONS)
    own = whole_pool(cluster)
    cluster.submit("own", own, "d", "")
    for _ in range(3):
        cluster.step("d")
    cluster.messages.clear()  # the recall among them
    creditor = cluster.instances["d"]
    cluster.now += 1_000_000
    cluster.hear(creditor, creditor.engine.on_entry(Ticked(cluster.now)))
    cluster.messages.clear()
    for _ in range(8):
        cluster.step("d")
    cluster.step("p")
    assert away(debtor) == 0, "the step that read it was missed"
    end(cluster)
    assert preemptions(cluster) == 1
    assert len(own.emitted) == own.max_tokens


@covering({"after": range(10), "dies": ["p", "d"], "by_queries": [False, True]}, together=1)
def test_a_death_at_any_moment_loses_nothing(dies: str, after: int, by_queries: bool) -> None:
    cluster = start(by_queries=by_queries)
    cluster.lend(NAME, SECTIONS, "d")
    for _ in range(after):
        if cluster.messages:
            cluster.deliver(0)
        else:
            cluster.copy("d", 0, 5)
            cluster.step("p")
    cluster.crash(dies)
    end(cluster)


def test_nothing_goes_where_nothing_may() -> None:
    cluster = start()
    debtor = cluster.instances["p"]
    request = debtor.core.running[0]
    borrowed = debtor.handovers.borrowed
    assert borrowed.move_kvcache(request, 0, "d") == "no section is to be lent"
    request.short_rope_tokens = request.num_tokens
    assert "frequencies change" in borrowed.move_kvcache(request, 1, "d")
    request.short_rope_tokens = 0
    cluster.lend(NAME, 2, "nobody")
    turn(cluster)
    cluster.hear(debtor, debtor.engine.on_entry(PeerLost("nobody", 0)))
    assert len(borrowed) == 0 or away(debtor) == 0
    cluster.lend(NAME, 2, "p")
    end(cluster)
    assert cluster.entries[NAME].end is not None


def test_a_grant_that_finds_its_request_without_pages_is_given_back() -> None:
    """As after a step that failed: nothing was committed since the request gave way."""
    cluster = start()
    debtor = cluster.instances["p"]
    cluster.lend(NAME, 2, "d")
    debtor.core.scheduler.seats.start_again(debtor.core.running[0])
    while cluster.messages:
        cluster.deliver(0)
    assert len(debtor.handovers.borrowed) == 0
    cluster.settle()
    ended = cluster.entries[NAME]
    assert ended.end is not None and ended.emitted == expected_output(PROMPT, ended.max_tokens)
    assert lent(cluster) == 0


def test_a_debtors_request_does_not_migrate() -> None:
    cluster = start()
    debtor = cluster.instances["p"]
    cluster.lend(NAME, 2, "d")
    run(cluster, lambda: away(debtor) == 2)
    cluster.migrate(NAME, "e")
    end(cluster)
    assert cluster.moved == 0


def test_nobody_lends_what_it_borrowed() -> None:
    """A debtor refuses to lend, and a creditor to borrow."""
    cluster = start()
    cluster.submit("other", Entry(prompt_of(2, 37), 12, ""), "d", "")
    run(cluster, lambda: bool(cluster.entries["other"].emitted))
    cluster.lend(NAME, 2, "d")
    run(cluster, lambda: away(cluster.instances["p"]) == 2)
    cluster.lend("other", 2, "p")
    turn(cluster)
    cluster.lend("other", 2, "e")
    turn(cluster)
    turn(cluster)
    assert lent(cluster, "p") == lent(cluster, "e") == 0
    end(cluster)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": GroupKind.SLIDING, "window_tokens": 9}, "no full attention"),
        ({"page_tokens": 24}, "do not divide"),
        ({"counts_images": True}, "its pages hold images among the text"),
    ],
)
def test_what_cannot_be_lent_says_why(change: dict[str, Any], why: str) -> None:
    cluster = start()
    debtor = cluster.instances["p"]
    (group,) = debtor.core.memory.layout.groups
    (request,) = debtor.core.running
    assert local_reason(request.model, [group]) == ""
    assert why in local_reason(request.model, [replace(group, **change)])
    dropping = replace(group, kind=GroupKind.DROPPING, window_tokens=9)
    assert "drops tokens" in local_reason(request.model, [group, dropping])
    end(cluster)


TestLending = Lending.TestCase
TestLending.settings = SOME
