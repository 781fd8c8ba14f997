"""Sessions and images, replayed: a turn waits for its answer and finds it in the cache."""

from dataclasses import replace

import pytest

from kvell.clock import VirtualClock
from kvell.engine.core.journal import Journal
from kvell.engine.protocol.messages import Submit
from kvell.engine.requests.limits import Limits
from kvell.memory import GroupKind, LayerSpec, audit, create_core, plan_layout
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import ImageRow, TraceRow
from tests.simulator.replays import MACHINE, Replay, layer_of, layout_of, make_replay, row

PLAIN = ((0, 1),)


def said(session: str, at: float, prompt: int, output: int, continues: bool = True) -> TraceRow:
    return replace(row(prompt, output, at=at), session=session, continues=continues)


TALK = [said("s", 0.0, 6, 3, False), said("s", 1.0, 13, 4), said("s", 30.0, 20, 2)]
"""Steps take a second: the first answer ends at 3 s, after the second question's time."""


class TestTurns:
    def test_the_next_turn_comes_with_the_answer(self) -> None:
        run = make_replay(layout_of(*PLAIN), TALK)
        assert [(r.admitted_step, r.finish_step) for r in run.requests] == [(1, 3), (4, 7), (8, 9)]
        assert run.loop.now_seconds == pytest.approx(9.0, abs=1e-3)

    def test_and_not_before_its_time(self) -> None:
        run = make_replay(layout_of(*PLAIN), TALK, "trace")
        assert [r.admitted_step for r in run.requests] == [1, 4, 8]
        # The last question came 29 s after the one before it, which came at 3 s.
        assert run.loop.now_seconds == pytest.approx(3.0 + 29.0 + 2.0, abs=1e-2)

    def test_sessions_may_be_ignored(self) -> None:
        run = make_replay(layout_of(*PLAIN), TALK, sessions=False)
        # Each waits only until what it shares with the one before is computed.
        assert [r.admitted_step for r in run.requests] == [1, 2, 3]

    def test_a_turn_hits_the_answer_too(self) -> None:
        # 6 + 3 tokens, the last of them never computed: two whole pages of 4.
        run = make_replay(layout_of(*PLAIN), TALK)
        assert [r.hit_tokens for r in run.requests] == [0, 8, 16]

    def test_recorded_sessions_wait_without_sharing_more_than_their_blocks(self) -> None:
        rows = [replace(row(9, 3, [1], at=0.0), session="s"), replace(row(20, 2, [1]), session="s")]
        run = make_replay(layout_of(*PLAIN), rows)
        assert [r.admitted_step for r in run.requests] == [1, 4]
        assert [r.hit_tokens for r in run.requests] == [0, 4]

    def test_a_refused_turn_does_not_end_the_session(self) -> None:
        rows = [said("s", 0.0, 5, 1, False), said("s", 1.0, 900, 1), said("s", 2.0, 902, 1)]
        rows.append(replace(row(7, 1, at=3.0), session="s"))
        run = make_replay(layout_of(*PLAIN, large_pages=8), rows)
        report = run.report()
        assert (report["requests_finished"], report["requests_refused"]) == (2, 2)
        assert [r.admitted_step for r in run.requests] == [1, None, None, 2]

    @pytest.mark.parametrize("arrivals", ["start", "trace"])
    def test_every_turn_is_told_what_was_answered(self, arrivals: str) -> None:
        rows = [replace(r, output_tokens=min(r.output_tokens, 9)) for r in small_chat(40)]
        journal = Journal()
        run = make_replay(
            layout_of(*PLAIN, large_pages=600),
            rows,
            "trace" if arrivals == "trace" else "start",
            journal=journal,
        )
        assert run.report()["requests_finished"] == len(rows)
        told = {int(e.request_id): e.spec.prompt for e in journal.entries if isinstance(e, Submit)}
        maker = PromptMaker(rows)
        assert told == {i: maker.prompt(i).astype("<i4").tobytes() for i in range(len(rows))}
        finished = {r.index: r.finish_step for r in run.requests}
        for i, trace_row in enumerate(rows):
            if trace_row.continues:
                before = max(j for j in range(i) if rows[j].session == trace_row.session)
                assert (run.requests[i].admitted_step or 0) > (finished[before] or 0)


def small_chat(count: int) -> list[TraceRow]:
    """Turns of the chat generator's sessions, cut to a few tokens."""
    rows: list[TraceRow] = []
    ends: dict[str | None, int] = {}
    for turn in generate_trace("chat", count):
        prompt = ends.get(turn.session, 0) + 7 if turn.continues else 5
        rows.append(replace(row(prompt, 4, at=turn.arrival_s), session=turn.session))
        rows[-1] = replace(rows[-1], continues=turn.continues and prompt < 200)
        ends[turn.session] = prompt + 9
    return rows


class TestImages:
    def test_figures_count_the_tokens_that_stand_for_images(self) -> None:
        rows = generate_trace("mmmu-pro", 3)
        run = make_replay(layout_of(*PLAIN, large_pages=8), rows)
        assert [r.prompt_tokens for r in run.requests] == [6_236] * 3
        assert run.report()["requests_refused"] == 3

    @pytest.mark.parametrize("images_in_text", [True, False])
    def test_the_engine_is_told_where_they_are(self, images_in_text: bool) -> None:
        across = [] if images_in_text else [LayerSpec(1, GroupKind.CROSS, 1, 8, 2)]
        layers = [layer_of(0, 0, 1), *across]
        layout = plan_layout(layers, 1 << 16, page_tokens=4)
        images = (ImageRow(0, 20, 3), ImageRow(6, 8, 1))
        rows = [replace(row(10, 2), images=images), row(10, 2), replace(row(9, 1), images=images)]
        core = create_core(layout)
        run = Replay(
            core,
            layers,
            Limits(64, 8, 200, min_chunk_tokens=4),
            rows,
            "start",
            MACHINE,
            VirtualClock(),
            records=True,
            images_in_text=images_in_text,
        )
        run.run()
        assert run.report()["requests_finished"] == 3
        assert audit(layout, core.snapshot()) == []
        told = [entry for entry in run.entries if isinstance(entry, Submit)]
        spans = ((0, 20, 20), (26, 8, 8)) if images_in_text else ((0, 1, 20), (7, 1, 8))
        assert [entry.spec.images for entry in told] == [spans, (), spans]
        lengths = [38, 10, 37] if images_in_text else [12, 10, 11]
        assert [len(entry.spec.prompt) // 4 for entry in told] == lengths
        assert [r.prompt_tokens for r in run.requests] == lengths
