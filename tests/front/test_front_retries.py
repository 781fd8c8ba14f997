"""Whether a request is tried again: who is blamed for the end of an instance."""

import pytest

from kvell.cluster.routed_request import BLAMELESS, MOST_RETRIES, Attempts, Cause


@pytest.mark.parametrize("cause", sorted(BLAMELESS))
def test_an_end_that_no_request_caused_blames_none(cause: Cause) -> None:
    """Not even one that was alone; but nobody is tried for ever."""
    attempts = Attempts()
    assert [attempts.after(cause, sole=True) for _ in range(MOST_RETRIES)] == [None] * MOST_RETRIES
    assert (attempts.alone, attempts.deaths) == (0, MOST_RETRIES)
    refusal = attempts.after(cause, sole=True)
    assert refusal is not None and "retried twice" in refusal


@pytest.mark.parametrize("cause", ["crash", "hung", "protocol"])
def test_one_that_was_alone_twice_is_refused(cause: Cause) -> None:
    attempts = Attempts()
    assert attempts.after(cause, sole=True) is None
    refusal = attempts.after(cause, sole=True)
    assert refusal is not None and "two instances ended" in refusal


def test_only_a_crash_puts_a_request_on_probation_at_once() -> None:
    causes: tuple[Cause, ...] = ("crash", "killed", "cut", "hung", "protocol", "drained")
    on_probation = []
    for cause in causes:
        attempts = Attempts()
        attempts.after(cause, sole=False)
        if attempts.on_probation:
            on_probation.append(cause)
    assert on_probation == ["crash"]
