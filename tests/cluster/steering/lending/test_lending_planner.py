"""Rounds of heartbeats: what is planned from old views, and what becomes of refused moves."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.cluster.instance_load import SHORT_PART
from kvell.cluster.steering.lending.planner import (
    MOST_COPY_COST,
    MOVING_PART,
    RESERVED_ROUNDS,
    LoanPlanner,
    sections_to_copy,
)
from kvell.cluster.steering.placements import lendable_sections
from kvell.cost.prices import ExecCosts
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import InstanceReport
from kvell.vocabulary import RequestId
from tests.cluster.steering.lending.loads import BLOCK, COSTS, SECTION, entries
from tests.reports import Party, facts, load

POOL = 64
"""Sections of a pool."""
FAR = structs.replace(COSTS, away_token_seconds=4e-6)
FACTS = facts(token_bytes=BLOCK // SECTION, section_bytes=BLOCK, section_tokens=SECTION)


def placed(request: str, home: str, **away: int) -> tuple[RequestPlacementEntry, ...]:
    name = RequestId(request)
    there = [RequestPlacementEntry(name, at, count, local=False) for at, count in away.items()]
    return (RequestPlacementEntry(name, home, 9, local=True), *there)


def party(
    name: str,
    free: int,
    waiting: int = 0,
    placements: tuple[RequestPlacementEntry, ...] = (),
    longest: tuple[int, ...] = (),
    takes: bool = True,
    memory_waiting: int | None = None,
    head: int = 1,
    growth: int = 0,
) -> Party:
    """:param head: sections of the first request that waits; ``growth``: of those that run."""
    said = load(
        *(free * BLOCK, POOL * BLOCK, waiting),
        running=2,
        held_tokens=(POOL - free) * SECTION,
        waiting_tokens=(waiting - 1 + head) * SECTION if waiting else 0,
        memory_waiting=memory_waiting,
        head_tokens=head * SECTION if waiting else 0,
        head_bytes=head * BLOCK if waiting else 0,
        growth_bytes=growth * BLOCK,
        longest=entries(name, list(longest)),
        placements=placements,
    )
    report = InstanceReport(FACTS, said)
    return Party(name, waiting, free * BLOCK, POOL * BLOCK, report=report, can_take=takes)


class Rounds:
    """A planner, and heartbeats that come to it."""

    def __init__(self, settling: int = 0) -> None:
        self.planner = LoanPlanner(1.0, settling)
        self._said: dict[str, InstanceReport] = {}

    def moves(self, *instances: Party, silent: str = "") -> list[tuple[str, str, str, int]]:
        """The moves once all have beaten again, but a silent one."""
        for one in instances:
            if one.instance_id != silent:
                assert one.report.load is not None
                said = structs.replace(one.report.load)  # an equal one, and another
                self._said[one.instance_id] = InstanceReport(FACTS, said)
        heard = [replace(one, report=self._said[one.instance_id]) for one in instances]
        moves = self.planner.plan(heard)
        return [(one.request_id, one.source, one.target, one.num_blocks) for one in moves]


DEBTOR = party("d", 8, waiting=2, longest=(40, 3))
CREDITOR = party("c", 50)


def test_who_waits_has_room_once_sections_are_elsewhere() -> None:
    assert Rounds().moves(DEBTOR, CREDITOR) == [("d:0", "d", "c", 2)]


def test_nothing_is_planned_before_all_have_beaten_again() -> None:
    rounds = Rounds()
    rounds.moves(party("d", 50), CREDITOR)
    assert rounds.moves(DEBTOR, CREDITOR, silent="c") == []
    assert rounds.moves(DEBTOR, CREDITOR)


def test_one_that_has_said_nothing_yet_holds_up_the_plan() -> None:
    new = Party("new", 0, 0, 0, report=InstanceReport(FACTS))
    assert LoanPlanner(1.0).plan([DEBTOR, CREDITOR, new]) == []


@pytest.mark.parametrize("settling", [0, 2])
def test_a_refused_move_is_planned_anew_when_its_reservation_has_expired(settling: int) -> None:
    rounds = Rounds(settling)
    assert rounds.moves(DEBTOR, CREDITOR)
    for _ in range(RESERVED_ROUNDS + settling):
        assert rounds.moves(DEBTOR, CREDITOR) == []
    assert rounds.moves(DEBTOR, CREDITOR) == [("d:0", "d", "c", 2)]


def test_what_has_come_is_reserved_no_longer() -> None:
    rounds = Rounds()
    rounds.moves(DEBTOR, CREDITOR)
    there = party("d", 8, 2, placed("d:0", "d", c=2), longest=(38, 3))
    assert rounds.moves(there, party("c", 48)) == [("d:0", "d", "c", 2)]
    assert rounds.planner.parties == {"c", "d"}


def test_memory_that_is_spoken_for_is_not_planned_twice() -> None:
    rounds = Rounds()
    small = party("c", 19)
    assert rounds.moves(DEBTOR, small) == [("d:0", "d", "c", 2)]
    other = party("e", 8, waiting=9, longest=(40,))
    (move,) = rounds.moves(DEBTOR, small, other)
    assert move[:3] == ("e:0", "e", "c") and move[3] <= 19 - POOL // SHORT_PART - 2


def test_nobody_borrows_and_lends() -> None:
    """As heartbeats tell: the debtor of another lends to one, and the creditor of one is short."""
    lends = party("c", 8, waiting=2, longest=(30,))
    borrows = party("d", 8, 2, placed("d:0", "d", c=4), longest=(30,))
    third = party("e", 50)
    moves = Rounds().moves(lends, borrows, third)
    assert moves == [("d:0", "d", "e", 2)], "not the creditor, and not to it"
    idle = party("d", 60, 0, placed("d:0", "d", c=4))
    assert Rounds().moves(idle, party("e", 8, 2, longest=(30,)), CREDITOR) == [("e:0", "e", "c", 2)]


@pytest.mark.parametrize(
    "lender",
    [
        party("c", 50, waiting=1),
        party("c", 15),
        party("c", 50, takes=False),
        replace(CREDITOR, num_coming=1),
        party("c", 50, waiting=3, memory_waiting=0, head=50),
        party("c", 50, growth=50),
    ],
    ids=[
        "others wait there",
        "above the threshold",
        "it takes nothing",
        "one comes",
        "the next one will need it",
        "those that run will need it",
    ],
)
def test_who_needs_its_memory_lends_none(lender: Party) -> None:
    assert Rounds().moves(DEBTOR, lender) == []


def test_who_waits_for_a_seat_keeps_no_memory_from_others() -> None:
    """At saturation every instance has a line, and lends what its line has no use for."""
    lender = party("c", 50, waiting=7, memory_waiting=0)
    assert Rounds().moves(DEBTOR, lender) == [("d:0", "d", "c", 2)]
    seated = party("d", 8, waiting=2, longest=(40, 3), memory_waiting=0)
    assert Rounds().moves(seated, CREDITOR) == [], "memory would admit none of them"


def test_who_waits_needs_memory_for_the_answer_too() -> None:
    """Else it would be admitted, and others preempted as it grows."""
    assert DEBTOR.report.load is not None
    said = structs.replace(DEBTOR.report.load, answer_tokens=3 * SECTION)
    long = replace(DEBTOR, report=InstanceReport(FACTS, said))
    assert Rounds().moves(long, CREDITOR) == [("d:0", "d", "c", 8)]


def test_who_will_outgrow_its_memory_borrows_before_it_is_short() -> None:
    """With growth beyond what is free; not where all that runs will fit, nor in an idle cluster."""
    assert Rounds().moves(party("d", 20, longest=(40,), growth=24), CREDITOR) == [
        ("d:0", "d", "c", 4)
    ]
    assert Rounds().moves(party("d", 20, longest=(40,), growth=20), CREDITOR) == []
    assert Rounds().moves(party("d", 60, longest=(4,)), CREDITOR) == []


def test_those_of_other_hosts_are_asked_where_they_answer() -> None:
    apart = [structs.replace(FACTS, host=name) for name in "dc"]
    asked = [structs.replace(one, is_asked=True) for one in apart]
    for found, moves in ((apart, 0), (asked, 1)):
        pair = zip((DEBTOR, CREDITOR), found, strict=True)
        parties = [replace(one, report=InstanceReport(at, one.report.load)) for one, at in pair]
        assert len(LoanPlanner(1.0).plan(parties)) == moves


def test_loans_end_once_nothing_gains_from_them() -> None:
    """A debtor whose memory suffices plans no more."""
    rounds = Rounds()
    assert rounds.moves(DEBTOR, CREDITOR)
    enough = party("d", 10, 0, placed("d:0", "d", c=2), longest=(38, 3))
    for _ in range(6):
        assert rounds.moves(enough, party("c", 48)) == []


def test_those_in_other_moves_are_left_alone() -> None:
    planner = LoanPlanner(1.0)
    assert planner.plan([DEBTOR, CREDITOR], {"c"}) == []


def test_a_period_moves_what_can_be_copied_in_a_part_of_it() -> None:
    slow_link = structs.replace(COSTS, fetch_token_seconds=1 / SECTION / 12)
    crowd = party("d", 8, waiting=9, longest=(40,))
    slow = InstanceReport(structs.replace(FACTS, prices=slow_link), crowd.report.load)
    (move,) = LoanPlanner(1.0).plan([replace(crowd, report=slow), CREDITOR])
    assert move.num_blocks == 12 // MOVING_PART


@pytest.mark.parametrize(("debtor", "creditor", "blocks"), [(COSTS, FAR, 9), (FAR, COSTS, 5)])
def test_a_loan_is_priced_by_what_both_sides_report(
    debtor: ExecCosts, creditor: ExecCosts, blocks: int
) -> None:
    """A debtor that reads slowly elsewhere borrows less; how its creditor would read is nothing."""
    crowd = party("d", 8, waiting=9, longest=(40,))
    parties = [
        replace(one, report=InstanceReport(structs.replace(FACTS, prices=costs), one.report.load))
        for one, costs in ((crowd, debtor), (CREDITOR, creditor))
    ]
    assert [move.num_blocks for move in LoanPlanner(1.0).plan(parties)] == [blocks]


some = st.lists(
    st.tuples(
        st.integers(0, POOL),
        st.integers(0, 4),
        st.lists(st.integers(1, 30), max_size=3),
        st.booleans(),
        st.tuples(st.integers(0, 4), st.integers(1, 40), st.integers(0, 40)),
    ),
    min_size=4,
    max_size=4,
)


@given(st.lists(some, min_size=1, max_size=5), st.data())
def test_whatever_is_told_nobody_is_both_and_nobody_lends_what_it_lacks(
    told: list[list[tuple[int, int, list[int], bool, tuple[int, int, int]]]], data: st.DataObject
) -> None:
    """Views of drawn rounds, in which moves are carried out in part, or refused."""
    rounds = Rounds()
    away: dict[str, Counter[str]] = {}
    for views in told:
        instances = [
            party(f"i{n}", free, waiting, _told(away, f"i{n}"), tuple(longest), takes, *demand)
            for n, (free, waiting, longest, takes, demand) in enumerate(views)
        ]
        free_blocks = {one.instance_id: one.free_bytes // BLOCK for one in instances}
        moves = rounds.moves(*instances)
        lent: Counter[str] = Counter()
        for counts in away.values():
            lent.update(counts)
        debtors = {name.rpartition(":")[0] for name, counts in away.items() if counts.total()}
        sources, targets = {one[1] for one in moves}, {one[2] for one in moves}
        assert not sources & targets
        assert not sources & {name for name in lent if lent[name]} and not targets & debtors
        came: Counter[str] = Counter()
        for _, _, target, count in moves:
            came[target] += count
        for name, count in came.items():
            assert count <= free_blocks[name] - POOL // SHORT_PART
            assert count + lent[name] <= lendable_sections(POOL * BLOCK, BLOCK)
        for request, _, target, count in moves:
            done = data.draw(st.integers(0, count))
            if done:
                away.setdefault(request, Counter())[target] += done


def _told(away: dict[str, Counter[str]], home: str) -> tuple[RequestPlacementEntry, ...]:
    found = [(name, counts) for name, counts in away.items() if name.rpartition(":")[0] == home]
    return tuple(one for name, counts in found for one in placed(name, home, **counts))


@given(
    period=st.floats(0.01, 10),
    section=st.floats(1e-5, 1),
    cost=st.none() | st.floats(0, 1),
    dearer=st.floats(0, 1),
)
def test_copies_add_at_most_a_small_part_to_steps(
    period: float, section: float, cost: float | None, dearer: float
) -> None:
    """Beyond the one section that may always move."""
    count = sections_to_copy(period, section, cost)
    assert count >= 1 and (count == 1 or count * section <= period * (1 + 1e-9))
    if cost is None:
        assert count == 1 or count * section * MOVING_PART <= period * (1 + 1e-9)
    else:
        assert count == 1 or count * cost <= MOST_COPY_COST * period * (1 + 1e-9)
        assert sections_to_copy(period, section, cost + dearer) <= count
        assert sections_to_copy(period, section, 0.0) >= sections_to_copy(period, section, None)


def test_a_debtor_moves_as_many_sections_as_its_steps_can_hide() -> None:
    prices = structs.replace(COSTS, fetch_token_seconds=0.05 / SECTION)

    def with_cost(each: Party, seconds: float | None, **changes: int) -> Party:
        assert each.report.load is not None
        said = structs.replace(each.report.load, copy_seconds=seconds, **changes)
        return replace(each, report=InstanceReport(structs.replace(FACTS, prices=prices), said))

    def moved(debtor_seconds: float | None, creditor_seconds: float | None) -> int:
        debtor = with_cost(DEBTOR, debtor_seconds, head_bytes=30 * BLOCK)
        moves = LoanPlanner(1.0).plan([debtor, with_cost(CREDITOR, creditor_seconds)])
        return sum(move.num_blocks for move in moves)

    assert [moved(None, None), moved(0.0, 0.0)] == [5, 20]
    assert moved(0.01, 0.0) == moved(0.0, 0.01) == 2
