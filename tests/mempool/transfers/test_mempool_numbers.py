"""Numbers of rights, whose words do not meet."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.mempool.transfers.numbers import SLOTS, RightNumbers


def test_numbers_are_taken_in_turn_and_never_again() -> None:
    numbers = RightNumbers()
    assert [numbers.take() for _ in range(3)] == [1, 2, 3]
    numbers.free(3)
    assert 3 not in numbers and 2 in numbers and numbers.take() == 4


def test_words_in_use_are_passed_over() -> None:
    numbers = RightNumbers()
    stays = numbers.take()
    for _ in range(SLOTS - 1):
        numbers.free(numbers.take())
    assert numbers.take() == stays + SLOTS + 1
    assert stays in numbers and stays + SLOTS not in numbers


def test_with_all_words_in_use_numbers_go_on() -> None:
    """Such a right is not granted, as the table says; that is for the receiver to find."""
    numbers = RightNumbers()
    taken = [numbers.take() for _ in range(SLOTS)]
    beyond = numbers.take()
    assert beyond == SLOTS + 1 and beyond not in numbers
    numbers.free(beyond)
    assert all(number in numbers for number in taken)


@given(st.lists(st.one_of(st.none(), st.integers(0, 20)), max_size=300))
def test_rights_that_stand_have_words_of_their_own(steps: list[int | None]) -> None:
    """Take, or give back one of those that stand."""
    numbers, last = RightNumbers(), 0
    standing: list[int] = []
    for step in steps:
        if step is None or not standing:
            number = numbers.take()
            assert number > last
            last = number
            standing.append(number)
        else:
            numbers.free(standing.pop(step % len(standing)))
    assert len({number % SLOTS for number in standing}) == len(standing)
    assert all(number in numbers for number in standing)
