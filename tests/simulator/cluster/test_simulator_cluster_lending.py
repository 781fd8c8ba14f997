"""Clusters in virtual time whose instances lend each other memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import BorrowedPages, StepPlan
from kvell.mempool.entries import NOT_IN_PLACE
from kvell.mempool.transports.neighbours import MOST_NEIGHBOURS
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.cluster.instance import Links, PeerMappings
from kvell.vocabulary import SECTION_TOKENS
from tests.depth import scaled
from tests.simulator.cluster.lending_schedules import (
    LendingRun,
    LendingScenario,
    Order,
    drawn,
    pressed,
)
from tests.simulator.cluster.runs import MACHINE, POOL_TOKENS, QUIET, layout_of_one_layer, run_of
from tests.simulator.cluster.schedules import row as drawn_row
from tests.simulator.replays import row


def overloaded(hosts: Mapping[str, str] | None) -> dict[str, Any]:
    """Figures of two instances, one of which has two answers that outgrow its pool together.

    The other has room for a part of one, and never for all of it.
    """
    spec = ClusterSpec(
        {"mixed": 2},
        layout_of_one_layer(),
        Limits(2048, 8, max_model_len=POOL_TOKENS),
        MACHINE,
        Links(Link(0.001, 1e9)),
        routing="round-robin",
        hosts=hosts,
    )
    rows = [row(3000, 1300, at=0.0), row(2900, 1400, at=0.1), row(3000, 1300, at=0.2)]
    return cluster_figures(run_of(spec, rows))


def test_who_is_short_of_memory_borrows_and_preempts_nobody() -> None:
    """By itself: the front hears of the memory of both, and orders what its steering decides."""
    figures = overloaded({})
    assert figures["requests_finished"] == 3 and figures["requests_moved"] == 0
    sections = figures["sections"]
    assert sections["lent"] == sections["borrowed"] >= 2
    assert sections["returned"] == sections["lost"] == sections["recalled"] == 0
    assert figures["roles"]["mixed"]["sections"] == sections
    assert figures["roles"]["mixed"]["preemptions"] == 0
    section_bytes = SECTION_TOKENS * layout_of_one_layer().groups[0].token_bytes
    assert figures["moved_bytes"] == sections["lent"] * section_bytes


@pytest.mark.parametrize("hosts", [None, {"mixed-1": "another"}])
def test_the_same_cluster_preempts_where_nobody_can_lend(hosts: Mapping[str, str] | None) -> None:
    figures = overloaded(hosts)
    assert figures["requests_finished"] == 3 and figures["requests_moved"] == 0
    assert not any(figures["sections"].values())
    assert figures["roles"]["mixed"]["preemptions"] > 0
    assert figures["virtual_seconds"] > overloaded({})["virtual_seconds"] + 1


LONG = drawn_row(0.0, 50, 50)
"""A request at the first instance."""
LENDS = [Order(0.1, "lend", 0, 3)]
"""Four sections of it go to the second one."""


def gone(**changes: Any) -> LendingRun:
    quiet = {**QUIET, "counts": {"mixed": 2}, "mix": "full", "routing": "round-robin"}
    return LendingRun(LendingScenario(**{**quiet, "rows": [LONG], "faults": LENDS, **changes})).go()


def test_sections_are_read_where_they_went_and_given_back() -> None:
    run = gone()
    seen = run.seen()
    assert seen["Filled"] == seen["GiveBack"] == 4 and seen["read"] > 40
    assert run.cluster.instances["mixed-0"].device.borrowed_reads > 40  # type: ignore[attr-defined]
    assert not seen["missed"] and not seen["lost"] and not seen["recalled"]


def test_filling_takes_the_time_that_its_bytes_take() -> None:
    """On a slow link fewer steps read what is elsewhere."""
    reads = [gone(page_seconds=seconds).seen()["read"] for seconds in (0.0, 0.02)]
    assert 0 < reads[1] < reads[0] - 20


@pytest.mark.parametrize("mix", ["full", "state", "all", "windows"])
def test_a_step_that_reads_a_creditor_that_dies_is_missed(mix: str) -> None:
    """Its states were advanced from what it read, so the request does not go on from them."""
    run = gone(mix=mix, faults=[*LENDS, Order(0.2, "crash", 1, 0)])
    seen = run.seen()
    assert seen["missed"] == 1 and seen["lost"] == 4
    assert run.cluster.front.ends[0].preemptions == 1
    index = run.cluster.instances["mixed-0"].agent.core.snapshot().index
    assert max(one.end for one in index) >= LONG.num_tokens - 4, "what is right is kept"


def test_a_debtor_that_is_cancelled_in_a_missed_step_leaves_nothing_wrong() -> None:
    """Its text is found by nobody, as far as a state was advanced from what was read too late."""
    run = gone(
        mix="state",
        rows=[drawn_row(0.0, 50, 50, session="s"), drawn_row(0.0, 8, 2)],
        faults=[*LENDS, Order(0.2, "crash", 1, 0), Order(0.2, "cancel", 0, 0)],
    )
    assert run.seen()["missed"] == 1 and run.cluster.front.ends[0].reason == "cancelled"
    memory = run.cluster.instances["mixed-0"].agent.core
    assert not [one for one in memory.snapshot().index if one.group == 1]


def burst(**changes: Any) -> LendingRun:
    late = [drawn_row(0.16 + 0.01 * i, 60, 20) for i in range(7)]
    late += [drawn_row(2.4 + 0.01 * i, 60, 60) for i in range(6)]
    more: dict[str, Any] = {"rows": [LONG, *late], "large": 20, "seats": 4, **changes}
    return gone(**more)


def test_a_creditor_that_is_short_recalls_and_sections_come_home_or_are_computed_anew() -> None:
    seen = burst().seen()
    assert seen["recalled"] > 0 and seen["revoked"] == 0
    assert seen["returned"] + seen["lost"] > 0


@pytest.mark.parametrize("mix", ["full", "state"])
def test_a_debtor_that_stands_still_in_a_step_finds_its_right_gone(
    mix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The creditor, which needs it still, has taken its memory; others have written into it."""
    monkeypatch.setattr(Scheduler, "wants_memory", lambda _: True)
    run = burst(mix=mix, faults=[*LENDS, Order(0.19, "pause", 0, 3)])
    seen = run.seen()
    assert seen["recalled"] > 0 and seen["revoked"] > 0 and seen["missed"] == 1


@pytest.mark.parametrize("mix", ["full", "state"])
def test_a_creditor_whose_burst_is_over_leaves_the_debtor_what_it_reads(mix: str) -> None:
    """The same debtor stands still, and nobody needs the memory any more when the time is over."""
    seen = burst(mix=mix, faults=[*LENDS, Order(0.19, "pause", 0, 3)]).seen()
    assert seen["recalled"] > 0 and not seen["revoked"] and not seen["missed"]


def test_rows_that_count_without_their_rights_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepPlan, "find_missed", lambda _plan, _stands: ())
    monkeypatch.setattr(Scheduler, "wants_memory", lambda _: True)

    def is_seen(at: float) -> bool:
        try:
            burst(faults=[*LENDS, Order(at, "pause", 0, 3)])
        except AssertionError as error:
            return "lost token" in str(error)
        return False

    assert any(is_seen(0.17 + 0.01 * i) for i in range(8))


@dataclass
class Named:
    """What lies behind a pool, as far as :class:`.PeerMappings` looks at it."""

    name: str
    incarnation: int = 1
    rights: set[int] = field(default_factory=set)
    mapped: dict[int, "Named"] = field(default_factory=dict)

    @property
    def device(self) -> Any:
        return self

    def put_behind(self, source: "Named", first_large: int) -> None:
        self.mapped[first_large] = source

    def drop_behind(self, first_large: int) -> None:
        del self.mapped[first_large]


def behind_of(me: Named) -> PeerMappings:
    return PeerMappings(me.device, 10 * 4096, 4096)


def test_each_neighbour_has_a_place_until_there_are_none() -> None:
    me = Named("me")
    behind = behind_of(me)
    firsts = [behind.put(Named(str(i))) for i in range(MOST_NEIGHBOURS)]  # type: ignore[arg-type]
    assert len({*firsts}) == len(me.mapped) == MOST_NEIGHBOURS and min(firsts) >= 10
    assert behind.put(Named("late")) == NOT_IN_PLACE  # type: ignore[arg-type]
    behind.lose("3", 1)
    behind.take_away("3", 1)
    assert behind.put(Named("new")) == firsts[3]  # type: ignore[arg-type]


def test_who_is_met_again_before_its_loss_is_taken_in_keeps_its_new_place() -> None:
    me, other = Named("me"), Named("other", rights={5})
    behind = behind_of(me)
    behind.lose("other", 1)  # it was not met yet
    old = behind.put(other)  # type: ignore[arg-type]
    behind.lose("other", 1)
    new = behind.put(other)  # type: ignore[arg-type]
    behind.take_away("other", 1)
    assert [*me.mapped] == [old, new]
    behind.take_away("other", 1)
    assert [*me.mapped] == [new] and len(behind) == 1
    assert behind.stands(BorrowedPages(1, "other", 1, 5))
    for pages in ((1, "other", 1, 6), (1, "other", 2, 5), (1, "", 0, 0)):
        assert not behind.stands(BorrowedPages(*pages))


HAPPENS = ("Borrow", "Filled", "read", "GiveBack", "LoanOver", "recalled", "revoked", "missed")
"""What must have been seen over some schedules, beside sections ``returned`` and ``lost``."""


def seen_over(numbers: Iterable[int], **changes: Any) -> Counter[str]:
    """What happened to loans, over a drawn scenario and one under pressure for each number."""
    seen: Counter[str] = Counter()
    makes: tuple[Callable[[int], LendingScenario], ...] = (drawn, pressed)
    for number in numbers:
        for make in makes:
            seen.update(LendingRun(replace(make(number), **changes)).go().seen())
    return seen


def test_whoever_lends_and_whatever_happens_every_request_is_answered_rightly() -> None:
    seen = seen_over([4, 24, 44])
    missing = [what for what in (*HAPPENS, "returned", "lost") if not seen[what]]
    assert not missing, seen


@pytest.mark.long
def test_the_same_over_many_schedules() -> None:
    seen = seen_over(range(scaled(500)))
    missing = [what for what in (*HAPPENS, "returned", "lost") if not seen[what]]
    assert not missing, seen


def test_whoever_is_asked_and_whatever_happens_every_request_is_answered_rightly() -> None:
    seen = seen_over([4, 24, 44], asks=True)
    assert not [what for what in (*HAPPENS[:-1], "lost") if not seen[what]], seen
    assert not seen["returned"], "what is recalled is computed again"


@pytest.mark.long
def test_the_same_over_many_schedules_of_queries() -> None:
    seen = seen_over(range(scaled(300)), asks=True)
    assert not [what for what in (*HAPPENS, "lost") if not seen[what]], seen
