"""Metrics, on runs that can be counted on paper.

Pages hold 4 tokens.  A layer with h KV heads takes 32·h bytes a token.
"""

import pytest

from kvell.clock import VirtualClock
from kvell.engine.requests.limits import Limits
from kvell.memory import GroupKind, Layout, create_core, plan_layout
from kvell.prefix.groups.policies import GroupPolicy, SlidingPolicy
from kvell.simulator.report.metrics import Parts, RunningRequest, needed_bytes, waste
from kvell.simulator.report.timeline import GroupMoment
from tests.simulator.replays import MACHINE, Replay, layer_of, layout_of, make_replay, row

FULL = (GroupKind.FULL, GroupPolicy())
SLIDING = (GroupKind.SLIDING, SlidingPolicy(9))


class TestByHand:
    def test_full_attention_alone(self) -> None:
        # 5 prompt tokens, then 3 tokens: 5, 6 and 7 computed, in two pages of 128 bytes.
        run = make_replay(layout_of((0, 1)), [row(5, 3)])
        report = run.report()
        needed = [5 * 32, 6 * 32, 7 * 32]
        assert report["steps"] == 3
        assert report["batch_mean"] == 1.0
        assert report["waste"] == pytest.approx(1 - sum(needed) / 3 / 256)
        assert report["stranded"] == 0.0
        assert report["requests_finished"] == 1

    def test_sliding_window_beside_full(self) -> None:
        # Window 5 keeps 4 of 5, 6, 7 tokens, which straddle two pages of 256 bytes.
        run = make_replay(layout_of((0, 1), (5, 2)), [row(5, 3)])
        needed = [n * 32 + 4 * 64 for n in (5, 6, 7)]
        assert run.report()["waste"] == pytest.approx(1 - sum(needed) / 3 / (256 + 512))

    def test_never_written_pages_count_as_allocated(self) -> None:
        # 3 + 1 tokens need one of the two full pages in a large page.
        run = make_replay(layout_of((0, 1), (5, 2)), [row(3, 1)])
        report = run.report()
        assert report["waste"] == pytest.approx(1 - (3 * 32 + 3 * 64) / (2 * 128 + 256))
        assert report["stranded"] == 0.0
        assert [g["allocated_bytes_mean"] for g in report["groups"]] == [256, 256]

    def test_pages_behind_a_window_strand_their_large_page(self) -> None:
        # 9 tokens: sliding pages 0, 1 in one large page, 2 in the next, which has one more.
        # Page 0 leaves the window of 5 and stays cached.
        layout = layout_of((0, 2), (5, 1))
        report = make_replay(layout, [row(9, 1)]).report()
        sliding_bytes = 2 * 128 + 128  # pages 1 and 2, and the one never written
        assert report["waste"] == pytest.approx(1 - (9 * 64 + 4 * 32) / (3 * 256 + sliding_bytes))
        assert report["stranded"] == pytest.approx(128 / layout.pool_bytes)

    def test_shared_tokens_count_once(self) -> None:
        # The second resumes behind the 8 shared tokens of the first, in the same two pages.
        rows = [row(9, 4, [1, 2]), row(10, 4, [1, 2])]
        run = make_replay(layout_of((0, 1)), rows)
        samples = [s for s in run.means.samples if s.running == 2]
        first = samples[0].groups[0]
        assert run.requests[1].hit_tokens == 8
        assert first.used_bytes == 4 * 128
        # One step after the first began: it has 10 tokens, the second its 10.
        assert first.needed_bytes == (8 + 2 + 2) * 32

    def test_only_saturated_steps_leave_a_request_waiting(self) -> None:
        # Three pages: one request of up to 8 tokens at a time.
        report = make_replay(layout_of((0, 1), large_pages=3), [row(7, 1), row(7, 2)]).report()
        assert report["steps"] == 3
        assert report["batch_mean"] == report["batch_saturated_mean"] == 1.0
        assert report["waste_saturated"] == pytest.approx(1 - 7 / 8)
        assert report["waste"] == pytest.approx(1 - (7 + 7 + 8) / 24)


def at(*lengths: int, hits: int = 0) -> list[RunningRequest]:
    return [RunningRequest(length, hits) for length in lengths]


class TestNeededBytes:
    @pytest.fixture
    def layout(self) -> Layout:
        return layout_of((0, 1), (9, 1))

    def test_nothing_shared(self, layout: Layout) -> None:
        full, sliding = layout.groups
        assert needed_bytes(full, {FULL: 2}, at(5, 12), 2 + 3) == 2 * 17
        # Of 12 tokens the first page is kept: the step before read its last token.
        assert needed_bytes(sliding, {SLIDING: 3}, at(5, 12), 2 + 3) == 3 * (5 + 8)

    def test_each_reference_to_a_shared_page_takes_it_away(self, layout: Layout) -> None:
        assert needed_bytes(layout.groups[0], {FULL: 1}, at(9, 9, 9), 2 + 3) == 8 + 3

    def test_a_shared_page_where_windows_begin_is_counted_too_low_not_too_high(
        self, layout: Layout
    ) -> None:
        # Both have 13 tokens, and their windows of 8 begin with token 5, in a shared page.
        counted = needed_bytes(layout.groups[1], {SLIDING: 1}, at(13, 13), 2 + 2)
        needed = 3 + 4 + 1 + 1
        assert needed - 4 < counted <= needed

    def test_sliding_layers_in_a_full_group_need_their_window(self, layout: Layout) -> None:
        parts: Parts = {FULL: 1, SLIDING: 5}
        assert needed_bytes(layout.groups[0], parts, at(30, 6), 8 + 2) == 36 + 5 * (8 + 6)

    def test_what_such_layers_share_ends_where_the_hit_does(self, layout: Layout) -> None:
        # Of 16 tokens in common, the window of the second, 14 … 21, still has two.
        running = [*at(40), *at(22, hits=16)]
        parts: Parts = {FULL: 1, SLIDING: 5}
        counted = needed_bytes(layout.groups[0], parts, running, 10 + 2)
        assert counted == (40 + 6) + 5 * (8 + 8 - 2)


def test_one_page_size_wastes_what_lies_behind_windows() -> None:
    # Gemma-2 in small: half of the layers slide over half of the prompt, 75 % are needed.
    layers = [layer_of(0, 0, 1), layer_of(1, 33, 1)]
    layout = plan_layout(layers, 1 << 16, manager="paged", page_tokens=4)
    limits = Limits(64, 8, 100)
    run = Replay(
        create_core(layout), layers, limits, [row(64, 1)], "start", MACHINE, VirtualClock()
    )
    run.run()
    assert run.report()["waste"] == 0.25


def test_waste_of_nothing_is_none() -> None:
    assert waste([GroupMoment("full", 0, 0, 0, 0, 5)]) == 0.0
