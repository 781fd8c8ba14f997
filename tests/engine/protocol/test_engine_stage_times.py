"""Seconds that a request waited, prefilled and decoded."""

import pytest

from kvell.clock import VirtualClock
from kvell.engine.engine import StageTimes
from kvell.engine.protocol.codec import decode_event, encode_frame
from kvell.engine.protocol.messages import Event, Finished, Tokens
from kvell.vocabulary import FinishReason, RequestId
from kvell.wire.frames import FrameReader

A, B = RequestId("a"), RequestId("b")


def tokens(name: RequestId, index: int = 0) -> Tokens:
    return Tokens(name, 0, index, (7,))


def end(name: RequestId, reason: FinishReason = "length") -> Finished:
    return Finished(name, 0, reason)


def stages(event: Event) -> tuple[float, float, float]:
    assert isinstance(event, Finished)
    return event.queue_seconds, event.prefill_seconds, event.decode_seconds


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


def test_three_stages_follow_one_another(clock: VirtualClock) -> None:
    times = StageTimes(clock)
    times.on_submitted(A)
    clock.advance(1)
    times.on_admitted([A])
    clock.advance(2)
    times.add_times([tokens(A)])
    clock.advance(4)
    [_, event] = times.add_times([tokens(A, 1), end(A)])
    assert stages(event) == (1, 2, 4)


def test_a_preempted_request_waits_only_once(clock: VirtualClock) -> None:
    times = StageTimes(clock)
    times.on_submitted(A)
    times.on_admitted([A])
    clock.advance(5)
    times.on_admitted([A])
    [event] = times.add_times([end(A)])
    assert stages(event) == (0, 5, 0)


def test_who_was_never_admitted_only_waited(clock: VirtualClock) -> None:
    times = StageTimes(clock)
    times.on_submitted(A)
    clock.advance(3)
    [event] = times.add_times([end(A, "cancelled")])
    assert stages(event) == (3, 0, 0)


def test_requests_are_told_apart_and_names_may_come_again(clock: VirtualClock) -> None:
    times = StageTimes(clock)
    times.on_submitted(A)
    clock.advance(1)
    times.on_submitted(B)
    times.on_submitted(B)
    clock.advance(1)
    times.on_admitted([A, B])
    [first, second] = times.add_times([end(A), end(B)])
    assert (stages(first)[0], stages(second)[0]) == (2, 1)
    times.on_submitted(A)
    [again] = times.add_times([end(A)])
    assert stages(again) == (0, 0, 0)


def test_what_it_does_not_know_passes_unchanged(clock: VirtualClock) -> None:
    times = StageTimes(clock)
    times.on_admitted([A])
    events: list[Event] = [tokens(A), end(A)]
    assert times.add_times(events) == events


def test_times_travel_but_make_no_two_ends_different() -> None:
    slow = Finished(A, 0, "stop", queue_seconds=1.5, prefill_seconds=0.25, decode_seconds=2.0)
    assert slow == end(A, "stop")
    [body] = FrameReader().feed(encode_frame(slow))
    assert stages(decode_event(body)) == (1.5, 0.25, 2.0)
