"""Log probabilities of a response's text: compact, matched to texts, and linear in their number."""

from bisect import bisect_left, bisect_right
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.server.answers.deltas import Content
from kvell.server.api.bodies.completions import json_pieces
from kvell.server.api.bodies.logprobs import FEWEST_AT_ONCE, PendingTokens
from kvell.server.api.bodies.response_items import OutputWriter
from kvell.testing.instance import ByteText
from tests.depth import many
from tests.operations import operations

MODEL = ByteText()
TEXTS = st.text("ab", min_size=1, max_size=3)


def likely(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(number), 1, ((1, -1.0),)) for number in range(count)]


def naive(pending: list[int], text: str, *, is_first: bool) -> tuple[list[int], list[int]]:
    """The tokens of a text, and those that stay, found in the text of all."""
    joined = bytes(pending).decode()
    place = joined.rfind(text) if is_first else joined.find(text)
    if place < 0:
        return pending, []
    ends = list(accumulate(1 for _ in pending))
    first = bisect_right(ends, place) if is_first else 0
    last = bisect_left(ends, place + len(text))
    return pending[first : last + 1], pending[last + 1 :]


@many()
@given(st.lists(st.tuples(st.text("abc", max_size=80), TEXTS, st.booleans()), max_size=12))
def test_a_text_takes_the_tokens_up_to_its_end(steps: list[tuple[str, str, bool]]) -> None:
    pending, expected = PendingTokens(MODEL), list[int]()
    for added, text, is_first in steps:
        tokens = list(added.encode())
        pending.append(tokens, likely(len(tokens)))
        expected += tokens
        taken, expected = naive(expected, text, is_first=is_first)
        found = pending.take(text, is_first=is_first)
        assert [entry["token"] for entry in found] == [chr(token) for token in taken]
        assert len(pending) == len(expected)


def test_taking_a_text_costs_the_same_however_many_tokens_are_pending() -> None:
    counted = []
    for waiting in (4 * FEWEST_AT_ONCE, 100 * FEWEST_AT_ONCE):
        pending = PendingTokens(MODEL)
        pending.append([ord("a")] * waiting, likely(waiting))
        counted.append(operations(lambda: [pending.take("a", is_first=False) for _ in range(9)]))  # noqa: B023
    assert counted[0] == counted[1]


def test_tokens_without_text_are_kept_in_arrays_and_written_when_they_are_read() -> None:
    writer = OutputWriter("resp-1", [], MODEL)
    counted = [
        operations(lambda: [writer.write([], [0], likely(1)) for _ in range(100)])
        for _ in range(20)
    ]
    assert max(counted) == min(counted)
    writer.write([Content("hi")], list(b"hi"), likely(2))
    [*_, done] = writer.close("completed")
    written = [b"".join(json_pieces(done)) for _ in range(2)]
    assert written[0] == written[1]
    assert written[0].count(b'"top_logprobs"') == 2
