"""Algorithm 1: who lends how much to whom."""

from collections import Counter
from copy import deepcopy

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.steering.lending.algorithm import Creditor, Debtor, best_blocks, plan_moves
from kvell.cluster.steering.lending.model import PerformanceModel, ThroughputInputs
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
    load = ThroughputInputs(batch, 90_000, 90.0 * BLOCK, waiting, 1_000.0, 2.0 * BLOCK, 0)
    return Debtor(name, HERE, USUAL, load, entries(name, [4, 60, 7]), blocks)


def creditor(name: str, room: int, spared: int | None = None, blocks: int = 50) -> Creditor:
    load = ThroughputInputs(8, 9_000, 2.0 * BLOCK, spare_bytes=room * BLOCK)
    return Creditor(name, HERE, USUAL, load, room, room if spared is None else spared, blocks)


def moves_of(*one: Debtor | Creditor) -> list[tuple[str, str, str, int]]:
    debtors = [each for each in one if isinstance(each, Debtor)]
    creditors = [each for each in one if isinstance(each, Creditor)]
    found = plan_moves(debtors, creditors)
    return [(each.req_id, each.source, each.target, each.num_blocks) for each in found]


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
    assert moves_of(debtor(), creditor("c", 30, blocks=5)) == [("d:1", "d", "c", 4)]


def test_nobody_gains_where_nobody_waits_or_is_read_in_place() -> None:
    assert not moves_of(debtor(waiting=0), creditor("c", 30))
    far = creditor("c", 30)
    far.facts = facts(section_bytes=BLOCK, section_tokens=SECTION, host="other")
    assert not moves_of(debtor(), far)


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
    found = best_blocks(one, other, most)
    gains: dict[int, float] = {}
    for count in range(most + 1):
        moved = np.array([count * SECTION]), np.array([count * BLOCK])
        if count == 0 or model.covers(borrows, *moved)[0]:
            both = model.debtor(borrows, *moved) + other_model.creditor(lends, *moved)
            gains[count] = float(both[0])
    if not model.covers(borrows, NONE, NONE)[0]:
        assert found == 0, "more is elsewhere already than is covered, and it stays"
        return
    best = max(gains.values())
    assert gains[found] == best or (found == 0 and best <= gains[0] * (1 + 1e-9))
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
        of[one.req_id] += one.num_blocks
    hosts = {one.instance_id: one.facts.host for one in debtors}
    hosts |= {one.instance_id: one.facts.host for one in creditors}
    assert all(hosts[one.source] == hosts[one.target] for one in moves)
    for lender in before_creditors:
        assert came[lender.instance_id] <= max(0, min(lender.room, lender.blocks))
    for borrower in before_debtors:
        assert went[borrower.instance_id] <= borrower.blocks
        for request in borrower.longest:
            assert of[request.req_id] <= request.num_blocks
    touched = {one.source for one in moves} | {one.target for one in moves}

    def throughput(some: list[Debtor], others: list[Creditor]) -> float:
        made = [x.model.debtor(x.load, NONE, NONE) for x in some if x.instance_id in touched]
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
