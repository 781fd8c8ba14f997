"""How a ragged batch is cut into pieces: by hand, and every token once whatever the batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvell.attention.states import StateBatch
from kvell.models.states.scan_plan import SCAN_TOKENS, ScanPlan, plan_scans
from tests.depth import some


def batch(work: list[tuple[int, int, list[int]]]) -> StateBatch:
    """For each request: tokens before, new tokens, and lengths (of the step) to keep."""
    starts = [0]
    for _, count, _ in work:
        starts.append(starts[-1] + count)
    cuts = [(index, cut) for index, (_, _, kept) in enumerate(work) for cut in kept]
    return StateBatch(
        ints(starts),
        ints([before for before, _, _ in work]),
        ints([[7 + index] for index in range(len(work))]),
        ints([index for index, _ in cuts]),
        ints([cut for _, cut in cuts]),
        ints([[50 + index] for index in range(len(cuts))]).view(-1, 1),
    )


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tokens(plan: ScanPlan, lane: int, piece: int) -> list[int]:
    chosen = plan.lanes[lane]
    rows = chosen.rows.view(chosen.shape)[piece]
    return (rows if chosen.padding is None else rows[~chosen.padding[piece]]).tolist()


def test_decodes_are_one_lane_of_one_round_without_padding() -> None:
    plan = plan_scans(batch([(5, 1, []), (9, 1, []), (64, 1, [])]))
    (lane,) = plan.lanes
    assert lane.requests is None
    assert lane.padding is None
    assert lane.tokens is None
    assert (lane.shape, lane.rows.tolist()) == ((3, 1), [0, 1, 2])
    assert [(r.first, r.end, r.cuts) for r in lane.rounds] == [(0, 3, None)]
    assert plan.fresh is None


def test_pieces_end_at_multiples_of_the_requests_own_positions() -> None:
    """Tokens 60 … 199: 4, then 64, 64 and 8."""
    plan = plan_scans(batch([(60, 140, [])]))
    (lane,) = plan.lanes
    lengths = [len(tokens(plan, 0, piece)) for piece in range(lane.shape[0])]
    assert lengths == [4, 64, 64, 8]
    assert [row for piece in range(4) for row in tokens(plan, 0, piece)] == list(range(140))


def test_a_cut_ends_a_piece_and_nothing_else() -> None:
    plan = plan_scans(batch([(0, 70, [10, 64, 70])]))
    (lane,) = plan.lanes
    assert [len(tokens(plan, 0, piece)) for piece in range(lane.shape[0])] == [10, 54, 6]
    assert [None if r.cuts is None else r.cuts.tolist() for r in lane.rounds] == [[0], [1], [2]]
    assert plan.cut_ends.tolist() == [10, 64, 70]
    assert plan.fresh is not None
    assert plan.fresh.tolist() == [True]


def test_requests_with_more_pieces_come_first() -> None:
    plan = plan_scans(batch([(3, 5, []), (2, 1, [1]), (0, 130, [])]))
    decodes, prefills = plan.lanes
    assert decodes.requests is not None
    assert prefills.requests is not None
    assert decodes.requests.tolist() == [1]
    assert prefills.requests.tolist() == [2, 0]
    assert [(r.first, r.end) for r in prefills.rounds] == [(0, 2), (2, 3), (3, 4)]
    assert tokens(plan, 1, 1) == [0, 1, 2, 3, 4]
    assert tokens(plan, 1, 3) == [6 + 128, 6 + 129]
    (only,) = decodes.rounds
    assert only.cuts is not None
    assert only.cut_ranks is not None
    assert (only.cuts.tolist(), only.cut_ranks.tolist()) == ([0], [0])


def test_taking_pads_with_zeros_and_putting_leaves_padding_out() -> None:
    plan = plan_scans(batch([(0, 3, []), (0, 2, [])]))
    (lane,) = plan.lanes
    values = torch.arange(1.0, 11.0).view(5, 2)
    taken = lane.take(values)
    assert taken.shape == (2, 3, 2)
    assert taken[1, 2].tolist() == [0, 0]
    back = torch.zeros(5, 2)
    lane.put(taken + 1, back)
    assert torch.equal(back, values + 1)


work = st.tuples(st.integers(0, 200), st.integers(1, 150), st.sets(st.integers(1, 150)))


@some()
@given(st.lists(work, min_size=1, max_size=6))
def test_every_token_is_in_one_piece_in_order_and_every_cut_at_an_end(
    requests: list[tuple[int, int, set[int]]],
) -> None:
    made = batch([(b, n, sorted(c for c in cuts if c <= n)) for b, n, cuts in requests])
    plan = plan_scans(made)
    where = {request: [] for request in range(len(requests))}  # type: dict[int, list[int]]
    found: dict[int, int] = {}
    for number, lane in enumerate(plan.lanes):
        order = range(len(requests)) if lane.requests is None else lane.requests.tolist()
        for now in lane.rounds:
            for rank, piece in enumerate(range(now.first, now.end)):
                rows = tokens(plan, number, piece)
                where[order[rank]] += rows
                start = requests[order[rank]][0] - int(made.query_starts[order[rank]])
                assert (start + rows[0]) // SCAN_TOKENS == (start + rows[-1]) // SCAN_TOKENS
            if now.cuts is not None and now.cut_ranks is not None:
                for rank, cut in zip(now.cut_ranks.tolist(), now.cuts.tolist(), strict=True):
                    assert order[rank] == made.cut_requests[cut]
                    found[cut] = where[order[rank]][-1] + 1
    bounds = made.query_starts.tolist()
    assert all(rows == list(range(bounds[r], bounds[r + 1])) for r, rows in where.items())
    assert [found[cut] for cut in range(len(made.cut_tokens))] == plan.cut_ends.tolist()
