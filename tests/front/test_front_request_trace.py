"""Whoever follows one request hears that it was let in, and then exactly one end."""

from dataclasses import dataclass, field

import pytest

from kvell.engine.protocol.messages import Finished, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething, TryLater
from kvell.fleet.instance.death import InstanceDeath
from kvell.front.request_log import EndedRequest, LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.vocabulary import FinishReason, RequestId
from tests.reports import facts

KILLED = InstanceDeath("the instance was killed", "killed")


@dataclass
class Follower:
    """Keeps what it is told."""

    admissions: int = 0
    acceptances: int = 0
    ends: list[EndedRequest] = field(default_factory=list)

    def on_admitted(self) -> None:
        self.admissions += 1

    def on_accepted(self) -> None:
        self.acceptances += 1

    def on_ended(self, request: EndedRequest) -> None:
        self.ends.append(request)


def followed(name: str = "a") -> tuple[LogEntry, Follower]:
    follower = Follower()
    entry = LogEntry(
        RequestSpec(RequestId(name), b"\1\0\0\0", SamplingParams()), 10.0, trace=follower
    )
    return entry, follower


def finished(reason: FinishReason = "length", attempt: int = 0) -> Finished:
    return Finished(RequestId("a"), attempt, reason, queue_seconds=0.5)


def opened(*instances: str) -> RequestQueue:
    queue = RequestQueue(2)
    for name in instances:
        queue.line(name).open(facts(4))
    return queue


def test_an_answer_is_told_with_its_times_and_its_instance() -> None:
    queue, (entry, follower) = opened("mixed-1"), followed()
    queue.add(entry)
    assert (follower.admissions, follower.ends) == (1, [])
    queue.due(10.25)
    queue.tokens(Tokens(RequestId("a"), 0, 0, (1,)), 11.0)
    queue.tokens(Tokens(RequestId("a"), 0, 1, (2, 3)), 12.0)
    queue.on_finished(finished(), 13.0)
    [end] = follower.ends
    assert (end.arrived_seconds, end.first_token_seconds, end.seconds) == (10.0, 1.0, 3.0)
    assert (end.line_seconds, end.instance, end.output_tokens) == (0.25, "mixed-1", 3)
    assert end.finished == finished()


def test_who_leaves_the_line_had_no_instance_and_no_token() -> None:
    queue, (entry, follower) = opened(), followed()
    queue.add(entry)
    queue.drop(RequestId("a"), "cancelled", 13.0)
    [end] = follower.ends
    assert (end.finished.reason, end.first_token_seconds, end.instance) == ("cancelled", None, "")


def test_who_finds_no_place_is_not_let_in_and_has_no_end() -> None:
    queue, (late, follower) = opened(), followed("c")
    for name in ("a", "b"):
        queue.add(followed(name)[0])
    with pytest.raises(TryLater):
        queue.add(late)
    again, twice = followed("a")
    with pytest.raises(ChangeSomething):
        queue.add(again)
    for one in (follower, twice):
        assert (one.admissions, one.ends) == (0, [])


def test_another_attempt_is_no_end_and_no_second_admission() -> None:
    queue, (entry, follower) = opened("mixed-0"), followed()
    queue.add(entry)
    queue.due(10.0)
    queue.tokens(Tokens(RequestId("a"), 0, 0, (1,)), 11.0)
    queue.lost("mixed-0", KILLED, 12.0)
    queue.line("mixed-1").open(facts(4))
    queue.due(12.5)
    assert (follower.admissions, follower.ends) == (1, [])
    queue.on_finished(finished(), 13.0)
    assert follower.ends == [], "the first attempt's end says nothing of the second"
    queue.on_finished(finished("stop", attempt=1), 14.0)
    [end] = follower.ends
    assert (end.finished.attempt, end.instance, end.first_token_seconds) == (1, "mixed-1", 1.0)


def test_a_request_that_nobody_can_serve_any_more_ends_too() -> None:
    queue, (entry, follower) = opened(), followed()
    queue.add(entry)
    queue.fail_waiting("gave up", 12.0)
    [end] = follower.ends
    assert (end.finished.reason, end.seconds) == ("error", 2.0)


def test_a_request_that_was_dropped_ends_when_the_instance_says_so() -> None:
    queue, (entry, follower) = opened("mixed-0"), followed()
    queue.add(entry)
    queue.due(10.0)
    queue.drop(RequestId("a"), "stop", 11.0)
    assert follower.ends == []
    queue.on_finished(finished("cancelled"), 12.0)
    assert [one.finished.reason for one in follower.ends] == ["stop"]
