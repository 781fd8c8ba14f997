"""Which objectives are missed, step by step."""

from kvell.engine.core.lateness import EARLY_TPOT, EARLY_TTFT, Lateness, LatenessWatch
from kvell.engine.protocol.messages import Finished, Tokens
from kvell.vocabulary import RequestId

A, B = RequestId("a"), RequestId("b")


def token(request: RequestId, index: int = 0) -> Tokens:
    return Tokens(request, 0, index, (1,))


def watch() -> LatenessWatch:
    """Five seconds to the first token, one between tokens; a request came at 0."""
    made = LatenessWatch(5.0, 1.0)
    made.on_submitted(A, 0.0)
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
    late.on_submitted(A, 0.0)
    late.step([token(A)], 1.0)
    assert late.step([], 11.0) == Lateness(False, False)
    assert late.step([], 11.1) == Lateness(False, True)


def test_who_is_over_is_late_no_more() -> None:
    late = watch()
    late.on_submitted(B, 0.0)
    late.step([token(A), Finished(A, 0, "length")], 1.0)
    assert late.step([], 4.0) == Lateness(False, False)
    assert late.step([Finished(B, 0, "cancelled")], 9.0).ttft_late
    assert late.step([], 99.0) == Lateness(False, False)
    assert late.step([token(RequestId("unknown"))], 99.0) == Lateness(False, False)


def test_answers_are_expected_to_be_as_long_as_those_that_have_ended() -> None:
    late = LatenessWatch(5.0, 1.0, expected_tokens=2)
    for name in (A, B):
        late.on_submitted(name, 0.0)
    late.step([token(A), token(B)], 0.0)
    assert late.step([], 2.5).tpot_late, "two were expected"
    for index in range(1, 10):
        late.step([token(A, index)], 2.5)
    late.step([Finished(A, 0, "length")], 2.5)
    assert late.step([], 9.9) == Lateness(False, False), "ten are now"
    assert late.step([], 10.1).tpot_late


def test_first_tokens_count_as_late_long_before_their_objective_and_others_before_theirs() -> None:
    late = LatenessWatch.ahead_of(100.0, 1.0, expected_tokens=10)
    late.on_submitted(A, 0.0)
    assert late.step([], 100.0 * EARLY_TTFT) == Lateness(False, False)
    assert late.step([], 100.0 * EARLY_TTFT + 0.1).ttft_late
    assert EARLY_TTFT * 25 > 1, "nobody's own prompt makes it late"
    late.step([token(A)], 20.0)
    assert not late.step([], 20.0 + 10 * EARLY_TPOT).tpot_late
    assert late.step([], 20.1 + 10 * EARLY_TPOT).tpot_late
