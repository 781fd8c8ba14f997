"""The desk: credits, the waiting line, the log, and what an instance's death does to them."""

import asyncio

import pytest

from kvell.engine.protocol.messages import Cancel, Finished, Tokens
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething, TryLater
from kvell.server.front.admission_queue import AdmissionQueue
from kvell.server.front.mailbox import Mailbox, Output
from kvell.server.front.request_log import EndedRequest, LogEntry
from kvell.server.instance.restart import RestartPolicy
from kvell.vocabulary import FinishReason, RequestId


class Recorder:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def first_tokens(self, seconds: float, count: int, prompt_tokens: int) -> None:
        self.told.append(("first", seconds, count, prompt_tokens))

    def next_tokens(self, seconds: float, count: int) -> None:
        self.told.append(("next", seconds, count))

    def ended(self, request: EndedRequest) -> None:
        self.told.append((request.finished.reason, request))

    def rejected(self) -> None:
        self.told.append(("rejected",))


def entry(name: str, arrived: float = 0.0) -> LogEntry:
    return LogEntry(RequestId(name), b"\1\0\0\0", SamplingParams(), "", arrived)


def taken(each: LogEntry) -> Output:
    return asyncio.run(asyncio.wait_for(each.mailbox.take(), 1))


def finished(name: str, reason: FinishReason = "length") -> Finished:
    return Finished(RequestId(name), 0, reason)


def names_due(admission_queue: AdmissionQueue) -> list[str]:
    return [submit.request_id for submit in admission_queue.due(0.0)]


def opened(credits_: int, max_waiting: int = 8) -> AdmissionQueue:
    admission_queue = AdmissionQueue(max_waiting)
    admission_queue.open(credits_)
    return admission_queue


def test_submissions_follow_credits_in_order_of_arrival() -> None:
    admission_queue = opened(2)
    for name in "abc":
        admission_queue.add(entry(name))
    assert names_due(admission_queue) == ["a", "b"]
    assert names_due(admission_queue) == []
    admission_queue.finished(finished("b"), 1.0)
    assert names_due(admission_queue) == ["c"]
    assert (admission_queue.waiting, admission_queue.in_flight) == (0, 2)


def test_the_waiting_line_is_bounded() -> None:
    admission_queue = opened(1, max_waiting=2)
    for name in "abc":
        admission_queue.add(entry(name))
        admission_queue.due(0.0)
    with pytest.raises(TryLater, match="2 requests are waiting"):
        admission_queue.add(entry("d"))
    admission_queue.finished(finished("a"), 0.0)
    admission_queue.due(0.0)
    admission_queue.add(entry("d"))
    assert admission_queue.waiting == 2


def test_with_no_waiting_allowed_a_free_credit_is_enough() -> None:
    admission_queue = opened(1, max_waiting=0)
    admission_queue.add(entry("a"))
    admission_queue.due(0.0)
    with pytest.raises(TryLater):
        admission_queue.add(entry("b"))


def test_a_request_id_is_used_once_at_a_time() -> None:
    admission_queue = opened(1)
    for _ in range(2):
        admission_queue.add(entry("a"))
        with pytest.raises(ChangeSomething, match="request_id=a"):
            admission_queue.add(entry("a"))
        admission_queue.due(0.0)
        with pytest.raises(ChangeSomething, match="request_id=a"):
            admission_queue.add(entry("a"))
        admission_queue.finished(finished("a"), 0.0)


def test_tokens_reach_their_reader_merged_and_in_order() -> None:
    admission_queue, request = opened(1), entry("a")
    admission_queue.add(request)
    admission_queue.due(0.0)
    admission_queue.tokens(Tokens(request.request_id, 0, 0, (5, 6)), 1.0)
    admission_queue.tokens(Tokens(request.request_id, 0, 2, (7,)), 2.0)
    assert taken(request) == Output((5, 6, 7))
    admission_queue.finished(finished("a"), 3.0)
    assert taken(request) == Output((), finished("a"))


def test_repeated_positions_and_other_attempts_are_dropped() -> None:
    admission_queue, request = opened(1), entry("a")
    admission_queue.add(request)
    admission_queue.due(0.0)
    admission_queue.tokens(Tokens(request.request_id, 0, 0, (5, 6)), 1.0)
    admission_queue.tokens(Tokens(request.request_id, 0, 0, (5, 6, 7)), 1.0)
    admission_queue.tokens(Tokens(request.request_id, 1, 3, (8,)), 1.0)
    admission_queue.tokens(Tokens(RequestId("unknown"), 0, 0, (9,)), 1.0)
    assert taken(request).token_ids == (5, 6, 7)
    assert request.emitted_tokens == 3
    admission_queue.finished(Finished(request.request_id, 1, "stop"), 1.0)
    assert admission_queue.in_flight == 1


def test_a_waiting_request_is_dropped_without_a_word_to_the_instance() -> None:
    admission_queue, request = opened(0), entry("a")
    admission_queue.add(request)
    assert admission_queue.drop(request.request_id, "cancelled", 0.0) is None
    last = taken(request).finished
    assert last is not None
    assert last.reason == "cancelled"
    assert admission_queue.waiting == 0


def test_a_dropped_request_keeps_its_credit_until_the_instance_confirms() -> None:
    admission_queue, request = opened(1), entry("a")
    admission_queue.add(request)
    admission_queue.due(0.0)
    admission_queue.add(entry("b"))
    assert admission_queue.drop(request.request_id, "stop", 0.0) == Cancel(request.request_id)
    assert admission_queue.drop(request.request_id, "cancelled", 0.0) is None
    assert names_due(admission_queue) == []
    admission_queue.finished(finished("a", "cancelled"), 1.0)
    last = taken(request).finished
    assert last is not None
    assert last.reason == "stop"
    assert names_due(admission_queue) == ["b"]


def test_dropping_what_is_unknown_does_nothing() -> None:
    assert opened(1).drop(RequestId("nobody"), "cancelled", 0.0) is None


def test_death_fails_what_is_in_flight_and_keeps_what_waits() -> None:
    admission_queue, running, waiting = opened(1), entry("a"), entry("b")
    admission_queue.add(running)
    admission_queue.add(waiting)
    admission_queue.due(0.0)
    admission_queue.tokens(Tokens(running.request_id, 0, 0, (1, 2)), 0.0)
    assert admission_queue.fail_in_flight("it died", 1.0) == 1
    last = taken(running).finished
    assert last == Finished(
        running.request_id, 0, "error", prompt_tokens=1, output_tokens=2, message="it died"
    )
    assert names_due(admission_queue) == []
    admission_queue.open(4)
    assert names_due(admission_queue) == ["b"]
    admission_queue.fail_waiting("gave up", 2.0)
    assert admission_queue.in_flight == 1


def test_giving_up_fails_what_waits() -> None:
    admission_queue, request = opened(0), entry("a")
    admission_queue.add(request)
    admission_queue.fail_waiting("gave up", 0.0)
    last = taken(request).finished
    assert last is not None
    assert (last.reason, last.message) == ("error", "gave up")


def test_an_observer_hears_of_times_as_the_client_sees_them() -> None:
    recorder = Recorder()
    admission_queue = AdmissionQueue(8, recorder)
    admission_queue.open(1)
    admission_queue.add(entry("a", arrived=10.0))
    admission_queue.due(10.25)
    admission_queue.tokens(Tokens(RequestId("a"), 0, 0, (1,)), 10.5)
    admission_queue.tokens(Tokens(RequestId("a"), 0, 1, (2, 3)), 11.5)
    admission_queue.finished(finished("a"), 12.0)
    end = EndedRequest(finished("a"), 2.0, 0.25, 3, SamplingParams().max_tokens)
    assert recorder.told == [("first", 0.5, 1, 1), ("next", 1.0, 2), ("length", end)]


def test_who_leaves_the_line_was_in_it_all_the_time() -> None:
    recorder = Recorder()
    admission_queue = AdmissionQueue(8, recorder)
    admission_queue.add(entry("a", arrived=10.0))
    admission_queue.drop(RequestId("a"), "cancelled", 13.0)
    [(reason, end)] = recorder.told
    assert isinstance(end, EndedRequest)
    assert (reason, end.seconds, end.line_seconds) == ("cancelled", 3.0, 3.0)


def test_an_observer_hears_of_those_that_found_the_line_full() -> None:
    recorder = Recorder()
    admission_queue = AdmissionQueue(1, recorder)
    admission_queue.add(entry("a"))
    with pytest.raises(TryLater):
        admission_queue.add(entry("b"))
    assert recorder.told == [("rejected",)]


def test_a_mailbox_keeps_only_the_first_end() -> None:
    async def scenario() -> Output:
        mailbox = Mailbox()
        mailbox.finish(finished("a", "stop"))
        mailbox.finish(finished("a", "error"))
        return await mailbox.take()

    output = asyncio.run(scenario())
    assert output.finished == finished("a", "stop")


def test_pauses_double_up_to_a_bound_and_then_end() -> None:
    policy = RestartPolicy(first_seconds=1.0, longest_seconds=5.0, attempts=4)
    assert [policy.pause_seconds(n) for n in range(5)] == [1.0, 2.0, 4.0, 5.0, None]
