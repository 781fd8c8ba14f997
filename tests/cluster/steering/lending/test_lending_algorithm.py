"""Algorithm 1: who lends how much to whom."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import TypeVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.cluster.steering.lending.algorithm import (
    LEAST_GAIN,
    best_sections,
    plan_moves,
    reactive_moves,
)
from kvell.cluster.steering.lending.market import Creditor, Debtor
from kvell.cluster.steering.lending.model import PerformanceModel, ThroughputInputs
from kvell.cluster.steering.placements import reading_of
from kvell.cost.prices import ExecCosts
from tests.cluster.steering.lending.loads import (
    BLOCK,
    MODELS,
    SECTION,
    entries,
    loads,
    models,
    parties,
)
from tests.reports import facts

HERE = facts(section_bytes=BLOCK, section_tokens=SECTION)
USUAL = MODELS[0]
NONE = np.zeros(1)


def debtor(name: str = "d", waiting: int = 3, batch: int = 1, blocks: int = 50) -> Debtor:
    sizes = 1_000.0, 2.0 * BLOCK
    load = ThroughputInputs(batch, 90_000, 90.0 * BLOCK, waiting, *sizes, *sizes)
    return Debtor(name, HERE, USUAL, load, entries(name, [4, 60, 7]), blocks)


def creditor(
    name: str, room: int, spared: int | None = None, blocks: int = 50, batch: int = 8
) -> Creditor:
    load = ThroughputInputs(batch, batch * 1_000, 2.0 * BLOCK, spare_bytes=room * BLOCK)
    return Creditor(name, HERE, USUAL, load, room, room if spared is None else spared, blocks)


def moves_of(*one: Debtor | Creditor) -> list[tuple[str, str, str, int]]:
    debtors = [each for each in one if isinstance(each, Debtor)]
    creditors = [each for each in one if isinstance(each, Creditor)]
    found = plan_moves(debtors, creditors)
    return [(each.request_id, each.source, each.target, each.num_blocks) for each in found]


def test_the_longest_request_goes_in_part_to_where_most_memory_is() -> None:
    found = moves_of(debtor(), creditor("less", 20), creditor("most", 30))
    assert found == [("d:1", "d", "most", 6)]


def test_creditors_are_asked_in_turn_until_there_is_no_gain() -> None:
    found = moves_of(debtor(waiting=5), creditor("a", 4), creditor("b", 3), creditor("c", 2))
    assert found == [("d:1", "d", "a", 4), ("d:1", "d", "b", 2), ("d:1", "d", "c", 2)]


def test_the_smallest_batch_is_served_first() -> None:
    found = moves_of(debtor("late", batch=2), debtor("soon", batch=1), creditor("c", 6))
    assert [one[1] for one in found] == ["soon"]


def test_a_large_batch_borrows_nothing() -> None:
    most = USUAL.small_batch
    assert moves_of(debtor(batch=most), creditor("c", 30))
    assert not moves_of(debtor(batch=most + 1), creditor("c", 30))


def test_who_is_above_the_threshold_is_asked_no_more() -> None:
    found = moves_of(debtor("a"), debtor("b"), creditor("c", 40, spared=3))
    assert [one[1] for one in found] == ["a"]


def test_what_moves_in_a_period_is_bounded_on_both_sides() -> None:
    assert moves_of(debtor(blocks=4), creditor("c", 30)) == [("d:1", "d", "c", 4)]
    assert moves_of(debtor(), creditor("c", 30, blocks=5)) == [("d:1", "d", "c", 5)]


def test_nobody_gains_where_nobody_waits_or_is_read_in_place() -> None:
    assert not moves_of(debtor(waiting=0), creditor("c", 30))
    far = creditor("c", 30)
    far.facts = facts(section_bytes=BLOCK, section_tokens=SECTION, host="other")
    assert not moves_of(debtor(), far)


def one_head(blocks: int, waiting: int = 3) -> Debtor:
    """A long request in all of its memory; the head of the line needs ``blocks`` sections."""
    sizes = 500.0 * blocks, float(blocks * BLOCK), 200.0, 0.4 * BLOCK
    load = ThroughputInputs(1, 90_000, 90.0 * BLOCK, waiting, *sizes)
    return Debtor("d", HERE, USUAL, load, entries("d", [4, 60, 7]), 50)


def test_creditors_lend_together_what_none_of_them_has_for_the_head() -> None:
    """Pairs alone, as the paper has them, stop at the first creditor: nobody is admitted by it."""
    borrower, lenders = one_head(10), [creditor(name, 5, batch=0) for name in "abc"]
    assert all(best_sections(borrower, lender, 5) == 0 for lender in lenders)
    assert moves_of(borrower, *lenders) == [("d:1", "d", "a", 5), ("d:1", "d", "b", 5), *REST]
    lenders = [creditor(name, 5, batch=0) for name in "abc"]
    assert not moves_of(one_head(16), *lenders), "not even together"
    lenders = [creditor(name, 5, batch=8) for name in "abc"]
    assert not moves_of(one_head(10), *lenders), "what they lose is more than what is gained"


REST = [("d:1", "d", "c", 1)]
"""Two short ones behind the head need less than a section more."""


def test_what_the_head_needs_may_be_of_several_requests() -> None:
    borrower, lenders = one_head(64, waiting=1), [creditor(name, 33, batch=0) for name in "abc"]
    borrower.blocks = 80
    assert moves_of(borrower, *lenders) == [
        ("d:1", "d", "a", 33),
        ("d:1", "d", "b", 27),
        ("d:2", "d", "b", 4),
    ]


def test_a_plan_that_takes_several_periods_begins() -> None:
    """The head is admitted once all of its sections have moved, and not all move at once."""
    slow = one_head(20, waiting=1)
    slow.blocks = 3
    assert moves_of(slow, creditor("c", 30, batch=0)) == [("d:1", "d", "c", 3)]


def test_a_long_head_before_short_ones_is_not_taken_for_their_mean() -> None:
    """A queue [50K, short, short] admits none until the first one has room."""
    sizes = 50_000.0, 98.0 * BLOCK, 100.0, 0.2 * BLOCK
    load = ThroughputInputs(1, 90_000, 90.0 * BLOCK, 3, *sizes)
    freed = np.array([33.0, 97.0, 98.0, 98.2, 98.4]) * BLOCK
    assert USUAL.batch_with(load, freed).tolist() == [1, 1, 2, 3, 4]
    assert not moves_of(Debtor("d", HERE, USUAL, load, entries("d", [60]), 99), creditor("c", 60))


ASKED = facts(section_bytes=BLOCK, section_tokens=SECTION, host="d", is_asked=True)
"""An instance whose sections others ask for: each is a host of its own."""

Side = TypeVar("Side", Debtor, Creditor)


def asked(party: Side, costs: ExecCosts) -> Side:
    host = party.facts.host or party.instance_id
    party.facts = structs.replace(ASKED, host=host)
    party.model = PerformanceModel(costs)
    return party


NEAR = ExecCosts(asked_step_seconds=1e-3)
"""Queries are answered soon."""
REMOTE = ExecCosts(asked_step_seconds=1.0)
"""A round trip takes far longer than the rest of a step."""


def test_an_instance_is_asked_if_its_answers_come_in_time() -> None:
    assert moves_of(asked(debtor(), NEAR), asked(creditor("c", 30), NEAR))
    assert not moves_of(asked(debtor(), REMOTE), asked(creditor("c", 30), REMOTE))
    assert not moves_of(asked(debtor(), NEAR), creditor("c", 30)), "it answers no queries"


def test_memory_of_the_same_host_comes_before_what_is_asked_for() -> None:
    """And a request whose sections are read in one way is not read in the other as well."""
    near, far = asked(creditor("near", 6), NEAR), asked(creditor("far", 40), NEAR)
    near.facts = structs.replace(ASKED, host="d")
    borrower = asked(debtor(waiting=5), NEAR)
    borrower.facts = structs.replace(ASKED, host="d")
    assert moves_of(borrower, near, far) == [("d:1", "d", "near", 6), ("d:2", "d", "far", 4)]
    bound = asked(debtor(), NEAR)
    bound.reading = {entry.req_id: "in place" for entry in bound.longest}
    assert not moves_of(bound, asked(creditor("far", 40), NEAR))


def test_an_instance_of_the_same_host_is_asked_for_nothing() -> None:
    """Queries would be cheap, and reading in place gains nothing: only the other host lends."""
    costs = structs.replace(NEAR, away_token_seconds=1.0)
    near, far = asked(creditor("near", 40), costs), asked(creditor("far", 6), costs)
    near.facts = structs.replace(ASKED, host="d")
    borrower = asked(debtor(), costs)
    borrower.facts = structs.replace(ASKED, host="d")
    assert {move[2] for move in moves_of(borrower, near, far)} == {"far"}


# --------------------------------------------------------------------------- the paper's cases


def test_busy_instances_with_spare_memory_lend_as_in_figure_5() -> None:
    """A and D have long requests, A no memory; B and C are full of short ones and have some."""
    sizes = 500.0, 1.0 * BLOCK
    long_load = ThroughputInputs(1, 90_000, 90.0 * BLOCK, 8, *sizes, *sizes)
    some_left = replace(
        long_load, batch=4, waiting=3, spare_bytes=2 * BLOCK, head_bytes=3.0 * BLOCK
    )
    busy = ThroughputInputs(30, 9_000, 1.0 * BLOCK, spare_bytes=20 * BLOCK)
    moves = moves_of(
        Debtor("a", HERE, USUAL, long_load, entries("a", [85]), 50),
        Debtor("d", HERE, USUAL, some_left, entries("d", [40]), 50),
        *(Creditor(name, HERE, USUAL, busy, 20, 20, 50) for name in "bc"),
    )
    assert {move[1] for move in moves} == {"a", "d"} and {move[2] for move in moves} == {"b", "c"}


def test_an_instance_that_will_preempt_borrows_before_it_does() -> None:
    growing = ThroughputInputs(3, 9_000, 3.0 * BLOCK, spare_bytes=-4 * BLOCK)
    (move,) = moves_of(Debtor("d", HERE, USUAL, growing, entries("d", [9]), 50), creditor("c", 30))
    assert move[3] == 4
    calm = replace(growing, spare_bytes=0)
    assert not moves_of(Debtor("d", HERE, COVERS, calm, entries("d", [9]), 50), creditor("c", 30))


COVERS = MODELS[1]
"""By it a debtor's steps become faster even if no request needs the memory."""


@given(parties())
def test_whoever_needs_no_memory_borrows_none(drawn: tuple[list[Debtor], list[Creditor]]) -> None:
    needs = {debtor.instance_id for debtor in drawn[0] if debtor.load.needs_memory}
    assert {move.source for move in plan_moves(*drawn)} <= needs


@given(loads)
def test_what_is_missing_is_the_least_that_lets_one_more_request_run(
    load: ThroughputInputs,
) -> None:
    freed = np.array([0.0, max(0.0, load.missing_bytes - 1e-3), load.missing_bytes + 1e-3])
    if np.isinf(load.missing_bytes):
        assert USUAL.batch_with(load, np.array([0.0, 1e12]))[1] >= load.batch
        return
    before, below, with_it = USUAL.batch_with(load, freed)
    assert before == below < with_it or load.batch == 0


@given(models, models, loads, loads, st.integers(0, 80))
def test_the_number_is_the_best_of_all_that_are_covered(
    model: PerformanceModel,
    other_model: PerformanceModel,
    borrows: ThroughputInputs,
    lends: ThroughputInputs,
    most: int,
) -> None:
    """One by one, as the algorithm has it."""
    one = Debtor("d", HERE, model, borrows, (), most)
    other = Creditor("c", HERE, other_model, lends, most, most, most)
    found = best_sections(one, other, most)
    gains: dict[int, float] = {}
    for count in range(most + 1):
        moved = np.array([count * SECTION]), np.array([count * BLOCK])
        if count == 0 or model.borrowing(borrows, *moved)[1][0]:
            both = model.borrowing(borrows, *moved)[0] + other_model.creditor(lends, *moved)
            gains[count] = float(both[0])
    if not model.borrowing(borrows, NONE, NONE)[1][0]:
        assert found == 0, "more is elsewhere already than is covered, and it stays"
        return
    best = max(gains.values())
    alone = float(model.borrowing(borrows, NONE, NONE)[0][0])
    is_small = best <= gains[0] * (1 + 1e-9) or best - gains[0] <= LEAST_GAIN * alone * (1 + 1e-6)
    assert gains[found] == best or (found == 0 and is_small)
    assert not any(gains.get(count, -1.0) >= best for count in range(found)), "the fewest"


@given(parties())
def test_a_plan_keeps_to_all_bounds_and_lets_all_make_more_tokens(
    drawn: tuple[list[Debtor], list[Creditor]],
) -> None:
    before_debtors, before_creditors = deepcopy(drawn)
    debtors, creditors = drawn
    moves = plan_moves(debtors, creditors)
    assert all(one.num_blocks > 0 for one in moves)
    assert not {one.source for one in moves} & {one.target for one in moves}
    came: Counter[str] = Counter()
    went: Counter[str] = Counter()
    of: Counter[str] = Counter()
    for one in moves:
        came[one.target] += one.num_blocks
        went[one.source] += one.num_blocks
        of[one.request_id] += one.num_blocks
    sides = {party.instance_id: party.facts for party in debtors}
    sides |= {party.instance_id: party.facts for party in creditors}
    ways = {(one.request_id, reading_of(sides[one.source], sides[one.target])) for one in moves}
    assert None not in {way for _, way in ways}
    assert len(ways) == len({one.request_id for one in moves}), "one way for all of a request"
    for lender in before_creditors:
        assert came[lender.instance_id] <= max(0, min(lender.room, lender.blocks))
    for borrower in before_debtors:
        assert went[borrower.instance_id] <= borrower.blocks
        for request in borrower.longest:
            assert of[request.req_id] <= request.num_blocks
    touched = {one.source for one in moves} | {one.target for one in moves}

    def throughput(some: list[Debtor], others: list[Creditor]) -> float:
        made = [x.model.borrowing(x.load, NONE, NONE)[0] for x in some if x.instance_id in touched]
        made += [x.model.creditor(x.load, NONE, NONE) for x in others if x.instance_id in touched]
        return float(sum(one[0] for one in made))

    if moves:
        assert throughput(debtors, creditors) > throughput(before_debtors, before_creditors)


@given(parties(), st.randoms())
def test_equal_views_give_equal_plans_in_whatever_order_they_come(
    drawn: tuple[list[Debtor], list[Creditor]], chance: st.DataObject
) -> None:
    again = deepcopy(drawn)
    for side in again:
        chance.shuffle(side)  # type: ignore[attr-defined]
    assert plan_moves(*drawn) == plan_moves(*again)


@given(parties())
def test_reactive_moves_give_back_what_is_missing_and_no_more(
    both: tuple[list[Debtor], list[Creditor]],
) -> None:
    debtors, creditors = both
    missing = {
        debtor.instance_id: max(0, -(debtor.load.spare_bytes // debtor.facts.section_bytes))
        for debtor in debtors
    }
    may_leave = {debtor.instance_id: debtor.blocks for debtor in debtors}
    room = {creditor.instance_id: min(creditor.room, creditor.blocks) for creditor in creditors}
    moved, came = Counter[str](), Counter[str]()
    for move in reactive_moves(debtors, creditors):
        assert move.num_blocks > 0
        moved[move.source] += move.num_blocks
        came[move.target] += move.num_blocks
    assert all(count <= min(missing[name], may_leave[name]) for name, count in moved.items())
    assert all(count <= room[name] for name, count in came.items())
