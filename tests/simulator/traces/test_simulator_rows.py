"""Rows: images in their place, sessions, and what an ideal cache would hit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import (
    ImageRow,
    PlacedPrompt,
    TraceRow,
    continuation_problem,
    ideal_hit_tokens,
    place,
    predecessors,
    repeat,
)
from tests.simulator.replays import row


def turn(prompt: int, output: int, session: str | None = "s", **more: object) -> TraceRow:
    """A turn of a session; by default it continues the last one."""
    return replace(row(prompt, output), session=session, **{"continues": True} | more)  # type: ignore[arg-type]


class TestPlaced:
    ROW = replace(row(10, 1), images=(ImageRow(0, 5, 1), ImageRow(0, 3, 2), ImageRow(7, 5, 1)))

    def test_images_in_the_text(self) -> None:
        assert place(self.ROW, True) == PlacedPrompt(23, ((0, 5, 5), (5, 3, 3), (15, 5, 5)))

    def test_one_token_stands_for_an_image(self) -> None:
        assert place(self.ROW, False) == PlacedPrompt(13, ((0, 1, 5), (1, 1, 3), (9, 1, 5)))

    def test_no_images(self) -> None:
        assert place(row(10, 1), True) == place(row(10, 1), False) == PlacedPrompt(10, ())


class TestImageTokens:
    @pytest.mark.parametrize("images_in_text", [True, False])
    def test_spans_hold_the_contents_id_and_nothing_else_does(self, images_in_text: bool) -> None:
        rows = [replace(row(9, 1, [7, 8]), images=(ImageRow(0, 4, 5), ImageRow(6, 2, 0)))]
        prompt = PromptMaker(rows, images_in_text).prompt(0)
        where = place(rows[0], images_in_text)
        assert len(prompt) == where.prompt_tokens
        assert prompt.dtype == np.int32
        rest = prompt.copy()
        for (start, here, _), image in zip(where.images, rows[0].images, strict=True):
            assert set(prompt[start : start + here].tolist()) == {-1 - image.id}
            rest[start : start + here] = -(1 << 31)
        text = PromptMaker([replace(rows[0], images=())]).prompt(0)
        assert rest[rest > -(1 << 31)].tolist() == text.tolist()

    def test_equal_images_give_equal_prefixes_and_others_do_not(self) -> None:
        images = [(ImageRow(4, 6, each),) for each in (1, 1, 2)]
        rows = [replace(row(9, 1, [7]), images=each) for each in images]
        first, same, other = (PromptMaker(rows).prompt(i) for i in range(3))
        assert np.array_equal(first[:10], same[:10])
        assert first[10] != same[10]
        assert np.array_equal(first[:4], other[:4])
        assert first[4] != other[4]

    def test_the_largest_id_is_an_int32(self) -> None:
        rows = [replace(row(2, 1), images=(ImageRow(1, 1, (1 << 31) - 1),))]
        assert PromptMaker(rows).prompt(0)[1] == -(1 << 31)


class TestSessions:
    def test_predecessors(self) -> None:
        rows = [turn(1, 1, name) for name in ("a", "b", None, "a", None, "a", "b")]
        assert predecessors(rows) == [None, None, None, 0, None, 3, 1]

    def test_repetitions_are_sessions_of_their_own(self) -> None:
        rows = repeat([turn(3, 1, continues=False), turn(6, 1), turn(2, 2, None)], 3)
        assert [r.session for r in rows] == ["s", "s", None, "s#1", "s#1", None, "s#2", "s#2", None]
        assert predecessors(rows) == [None, 0, None, None, 3, None, None, 6, None]

    @pytest.mark.parametrize(
        ("after", "said"),
        [
            (turn(6, 1, continues=False), None),
            (turn(7, 1), None),
            (turn(6, 1), "ends at 6 tokens"),
            (replace(row(9, 1, [3]), continues=True), "block_hashes of its own"),
            (turn(9, 1, images=(ImageRow(7, 1, 1),)), None),
            (turn(9, 1, images=(ImageRow(5, 1, 1),)), "images"),
        ],
    )
    def test_what_a_turn_may_continue(self, after: TraceRow, said: str | None) -> None:
        problem = continuation_problem(after, row(4, 2))
        assert problem is None if said is None else said in str(problem)

    def test_images_are_inherited(self) -> None:
        first = replace(row(4, 2), images=(ImageRow(1, 9, 3),))
        assert continuation_problem(turn(9, 1, images=first.images), first) is None
        more = (*first.images, ImageRow(8, 9, 4))
        assert continuation_problem(turn(9, 1, images=more), first) is None
        assert "images" in str(continuation_problem(turn(9, 1), first))
        assert "no earlier line" in str(continuation_problem(turn(9, 1), None))

    def test_a_maker_refuses_what_cannot_be_continued(self) -> None:
        with pytest.raises(ChangeSomething, match=r"row 1.*ends at 6 tokens"):
            PromptMaker([turn(4, 2, continues=False), turn(5, 2)])


class TestContinuedTokens:
    def test_a_turn_begins_with_all_that_was_said(self) -> None:
        rows = [replace(row(6, 3, [7]), session="s"), row(5, 2), turn(12, 1), turn(20, 4)]
        maker = PromptMaker(rows)
        said = maker.prompt(0).tolist()
        for before, after in [(0, 2), (2, 3)]:
            said += [maker.output_token(before, i) for i in range(rows[before].output_tokens)]
            prompt = maker.prompt(after)
            assert len(prompt) == rows[after].prompt_tokens
            assert prompt[: len(said)].tolist() == said
            said = prompt.tolist()
        own = {int(maker.prompt(2)[9]), int(maker.prompt(3)[13]), int(maker.prompt(1)[0])}
        assert len(own) == 3

    def test_images_of_earlier_turns_stay_where_they_were(self) -> None:
        first = replace(row(4, 2), session="s", images=(ImageRow(1, 3, 8),))
        rows = [first, turn(9, 1, images=(*first.images, ImageRow(7, 2, 9)))]
        maker = PromptMaker(rows)
        whole = [*maker.prompt(0).tolist(), *(maker.output_token(0, i) for i in range(2))]
        assert maker.prompt(1)[: len(whole)].tolist() == whole
        assert maker.prompt(1).tolist().count(-10) == 2

    def test_a_thousand_turns_need_no_recursion(self) -> None:
        rows = [turn(2 * n + 1, 1, continues=n > 0) for n in range(1_500)]
        prompt = PromptMaker(rows).prompt(1_499)
        assert len(set(prompt.tolist())) == len(prompt) == 2_999


class TestIdealHits:
    def test_tree_prefixes_count_token_by_token(self) -> None:
        shared = list(range(5))
        rows = [row(9, 1, shared, 1), row(7, 1, shared[:3], 1), row(6, 1, shared, 1)]
        assert ideal_hit_tokens(rows) == 0 + 3 + 5

    def test_a_prompts_last_token_is_computed(self) -> None:
        assert ideal_hit_tokens([row(8, 1, [1, 2])] * 2) == 7

    def test_a_short_last_block_holds_as_many_tokens_as_a_prompt_has_had(self) -> None:
        rows = [row(6, 1, [1, 2]), row(9, 1, [1, 2]), row(9, 1, [1, 2])]
        assert ideal_hit_tokens(rows) == 0 + 6 + 8

    def test_a_turn_hits_all_but_the_answers_last_token(self) -> None:
        assert ideal_hit_tokens([turn(6, 3, continues=False), turn(12, 1), turn(14, 1)]) == 8 + 12

    @given(
        st.lists(
            st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 9)),
            min_size=1,
            max_size=8,
        ),
        st.integers(1, 3),
    )
    def test_as_many_as_tokens_say(
        self, drawn: list[tuple[list[int], int]], block_tokens: int
    ) -> None:
        """Compared with all earlier prompts, token by token."""
        rows = [_with_chain(path, tail, block_tokens) for path, tail in drawn]
        maker, seen, hits = PromptMaker(rows), list[list[int]](), 0
        for index in range(len(rows)):
            prompt = maker.prompt(index).tolist()
            hits += min(len(prompt) - 1, max((_common(prompt, one) for one in seen), default=0))
            seen.append(prompt)
        assert ideal_hit_tokens(rows) == hits


def _with_chain(path: list[int], tail: int, block_tokens: int) -> TraceRow:
    """A block's id stands for everything before it: the path, read as a number."""
    ids = [int("1" + "".join(map(str, path[: i + 1])), 3) for i in range(len(path))]
    prompt = max(1, len(ids) * block_tokens + tail - 5)
    kept = ids[: -(-prompt // block_tokens)]
    return row(prompt, 1, kept, block_tokens)


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
