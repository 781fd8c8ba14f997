"""Tokens of reasoning, counted between the tokens of its tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.server.api.routes.chat import ReasoningCount

START, END = 1, 2


@pytest.mark.parametrize(
    ("output", "opened", "chosen"),
    [
        ([], 0, 0),
        ([7, 7], 2, 0),
        ([7, 7, END, 7], 2, 0),
        ([START, 7, END, 7, END], 2, 1),
        ([START, END], 1, 0),
        ([9, START, 7, 7, 7], 5, 3),
        ([END, START, 7], 0, 1),
    ],
)
def test_what_lies_between_the_tags_counts(output: list[int], opened: int, chosen: int) -> None:
    for start, tokens in ((None, opened), (START, chosen)):
        count = ReasoningCount(END, start)
        count.push(output)
        assert count.tokens == tokens


def test_a_call_ends_the_reasoning() -> None:
    count = ReasoningCount(END, START, (8,))
    count.push([START, 7, 7, 8, 7])
    assert count.tokens == 2
    count.push([END, 7])
    assert count.tokens == 4


@given(st.lists(st.integers(0, 4), max_size=20), st.sampled_from([None, START]), st.data())
def test_the_cuts_do_not_matter(output: list[int], start: int | None, data: st.DataObject) -> None:
    whole, cut = ReasoningCount(END, start), ReasoningCount(END, start)
    whole.push(output)
    place = data.draw(st.integers(0, len(output)))
    for piece in (output[:place], output[place:]):
        cut.push(piece)
    assert cut.tokens == whole.tokens
