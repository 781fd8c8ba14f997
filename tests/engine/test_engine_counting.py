"""Counters by size and by position."""

from kvell.engine.counting import STEP_TOKENS_BUCKETS, Guesses, StepSizes


def test_a_step_is_counted_in_the_smallest_bucket_that_holds_it() -> None:
    sizes = StepSizes()
    for tokens in (1, 2, 8, 9, 16_384, 16_385):
        sizes.add(tokens)
    found = sizes.by_size()
    assert len(found) == len(STEP_TOKENS_BUCKETS) + 1
    assert found[:3] == (1, 2, 1)
    assert found[-2:] == (1, 1)
    assert sum(found) == 6
    assert sizes.tokens == 1 + 2 + 8 + 9 + 16_384 + 16_385


def test_nothing_was_guessed_yet() -> None:
    guesses = Guesses()
    guesses.add(0, 0)
    assert (guesses.drafts, guesses.draft_tokens, guesses.accepted_tokens) == (0, 0, 0)
    assert guesses.accepted_by_position() == ()


def test_right_guesses_are_counted_by_their_place() -> None:
    guesses = Guesses()
    guesses.add(2, 2)
    guesses.add(4, 1)
    guesses.add(3, 0)
    assert guesses.drafts == 3
    assert guesses.draft_tokens == 9
    assert guesses.accepted_by_position() == (2, 1, 0, 0)
    assert guesses.accepted_tokens == 3
