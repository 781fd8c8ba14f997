"""The tokens that two texts share."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.prefix.tokens import common_prefix
from tests.prefix.story import ints

texts = st.lists(st.integers(0, 2), max_size=14)


@given(texts, texts)
def test_the_common_prefix_is_the_longest_equal_beginning(
    left: list[int], right: list[int]
) -> None:
    size = common_prefix(ints(left), ints(right))
    assert left[:size] == right[:size]
    assert size == min(len(left), len(right)) or left[size] != right[size]
