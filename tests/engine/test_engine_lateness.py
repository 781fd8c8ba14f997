"""Who is late, step by step."""

from kvell.engine.lateness import Lateness, LatenessWatch
from kvell.engine.protocol import Finished, Tokens
from kvell.vocabulary import RequestId

A, B = RequestId("a"), RequestId("b")


def token(request: RequestId, index: int = 0) -> Tokens:
    return Tokens(request, 0, index, (1,))


def watch() -> LatenessWatch:
    """Five seconds to the first token, one between tokens; a request came at 0."""
    made = LatenessWatch(5.0, 1.0)
    made.submitted(A, 0.0)
    return made


def test_who_waits_too_long_is_late_before_and_with_its_first_token() -> None:
    late = watch()
    assert late.step([], 5.0) == Lateness(False, False)
    assert late.step([], 5.1) == Lateness(True, False)
    assert late.step([token(A)], 6.0) == Lateness(True, False)
    assert late.step([token(A, 1)], 6.5) == Lateness(False, False), "said once"


def test_answers_are_slow_on_average_and_while_nothing_comes() -> None:
    late = watch()
    late.step([token(A)], 1.0)
    assert late.step([], 2.0) == Lateness(False, False)
    assert late.step([], 2.1) == Lateness(False, True)
    late.step([token(A, 1)], 2.2)
    late.step([token(A, 2)], 2.3)
    assert late.step([], 3.9) == Lateness(False, False), "two came quickly"
    assert late.step([], 4.1) == Lateness(False, True)


def test_an_answer_of_many_tokens_may_wait_for_its_second() -> None:
    late = LatenessWatch(5.0, 1.0, expected_tokens=10)
    late.submitted(A, 0.0)
    late.step([token(A)], 1.0)
    assert late.step([], 11.0) == Lateness(False, False)
    assert late.step([], 11.1) == Lateness(False, True)


def test_who_is_over_is_late_no_more() -> None:
    late = watch()
    late.submitted(B, 0.0)
    late.step([token(A), Finished(A, 0, "length")], 1.0)
    assert late.step([], 4.0) == Lateness(False, False)
    assert late.step([Finished(B, 0, "cancelled")], 9.0).ttft_late
    assert late.step([], 99.0) == Lateness(False, False)
    assert late.step([token(RequestId("unknown"))], 99.0) == Lateness(False, False)
