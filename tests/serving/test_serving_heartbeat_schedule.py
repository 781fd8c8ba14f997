"""When a beat is due, and when somebody else may send it for the loop."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvell.serving.loop import HeartbeatSchedule

BEAT_SECONDS = 4.0
LONGEST_SECONDS = 20.0


def make_rhythm() -> HeartbeatSchedule:
    return HeartbeatSchedule(BEAT_SECONDS, LONGEST_SECONDS)


def test_the_first_beat_is_due_at_once_but_not_for_a_loop_that_has_not_begun() -> None:
    rhythm = make_rhythm()
    assert rhythm.is_due(0.0)
    assert rhythm.seconds_to_beat(0.0) == 0.0
    assert not rhythm.may_beat_alone(0.0)


@given(st.floats(0, 2 * LONGEST_SECONDS))
def test_a_busy_loop_is_vouched_for_up_to_the_longest_turn(busy_seconds: float) -> None:
    rhythm = make_rhythm()
    rhythm.beats(0.0)
    rhythm.works(0.0)
    expected = BEAT_SECONDS <= busy_seconds <= LONGEST_SECONDS
    assert rhythm.may_beat_alone(busy_seconds) == expected
    rhythm.works(busy_seconds)  # the next turn: it did not hang
    assert rhythm.may_beat_alone(busy_seconds) == rhythm.is_due(busy_seconds)
    rhythm.rests()
    assert not rhythm.may_beat_alone(busy_seconds)


class Beating(RuleBasedStateMachine):
    """A loop and a heart that do as they are told, in whole seconds, beside a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.rhythm = make_rhythm()
        self.now = 0.0
        self.last_beat: float | None = None
        self.turn_began: float | None = None

    @rule(seconds=st.integers(1, int(LONGEST_SECONDS)))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def loop_begins_a_turn(self) -> None:
        if self.rhythm.is_due(self.now):
            self.beat()
        self.rhythm.works(self.now)
        self.turn_began = self.now

    @rule()
    def loop_rests(self) -> None:
        self.rhythm.rests()
        self.turn_began = None

    @rule()
    def thread_looks(self) -> None:
        if self.rhythm.may_beat_alone(self.now):
            assert self.turn_began is not None
            assert self.now - self.turn_began <= LONGEST_SECONDS
            self.beat()

    @invariant()
    def it_is_due_when_no_beat_was_sent_for_long_enough(self) -> None:
        waited = BEAT_SECONDS if self.last_beat is None else self.now - self.last_beat
        assert self.rhythm.is_due(self.now) == (waited >= BEAT_SECONDS)
        assert self.rhythm.seconds_to_beat(self.now) == max(0.0, BEAT_SECONDS - waited)

    @invariant()
    def a_loop_that_works_and_does_not_hang_has_its_beats(self) -> None:
        works = self.turn_began is not None and self.now - self.turn_began <= LONGEST_SECONDS
        assert self.rhythm.may_beat_alone(self.now) == (works and self.rhythm.is_due(self.now))

    def beat(self) -> None:
        assert self.last_beat is None or self.now - self.last_beat >= BEAT_SECONDS
        self.rhythm.beats(self.now)
        self.last_beat = self.now


TestBeating = Beating.TestCase


def test_after_a_beat_in_its_place_the_loop_says_what_is_new() -> None:
    """Else a loop whose steps are short would be overtaken at each beat, and never tell."""
    rhythm = HeartbeatSchedule(0.5, 600.0)
    rhythm.beats(0.0)
    for beat in range(1, 4):
        at_seconds = 0.5 * beat + 0.02 * (beat - 1)
        rhythm.works(at_seconds - 0.02)
        assert not rhythm.is_due(at_seconds - 0.02)
        assert rhythm.may_beat_alone(at_seconds)
        rhythm.beats(at_seconds, alone=True)
        assert not rhythm.may_beat_alone(at_seconds + 0.01)
        assert rhythm.is_due(at_seconds + 0.02)
        rhythm.beats(at_seconds + 0.02)
        assert not rhythm.is_due(at_seconds + 0.03)
