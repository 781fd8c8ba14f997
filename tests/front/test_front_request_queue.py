"""The desk: credits, the waiting line, the log, and what an instance's death does to them."""

import asyncio

import pytest

from kvell.engine.protocol.messages import Cancel, Finished, Heartbeat, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import Bound, ChangeSomething, TryLater
from kvell.fleet.instance.death import InstanceDeath, death_of
from kvell.fleet.instance.supervisor import RestartPolicy
from kvell.front.request_log import EndedRequest, LogEntry, Mailbox, Output
from kvell.front.request_queue import RequestQueue
from kvell.vocabulary import FinishReason, RequestId
from tests.reports import facts, load

KILLED = InstanceDeath("it was killed", "killed")
CRASHED = InstanceDeath("it crashed", "crash")


class Recorder:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def first_tokens(self, seconds: float, count: int, prompt_tokens: int) -> None:
        self.told.append(("first", seconds, count, prompt_tokens))

    def next_tokens(self, seconds: float, count: int) -> None:
        self.told.append(("next", seconds, count))

    def on_ended(self, request: EndedRequest) -> None:
        self.told.append((request.finished.reason, request))

    def on_rejected(self, bound: Bound) -> None:
        self.told.append(("rejected", bound))

    def waits_idle(self) -> None:
        self.told.append(("waits idle",))


def entry(name: str, arrived: float = 0.0) -> LogEntry:
    return LogEntry(RequestSpec(RequestId(name), b"\1\0\0\0", SamplingParams()), arrived)


def entry_of(tenant: str, number: int) -> LogEntry:
    request_id = RequestId(f"{tenant}{number}")
    return LogEntry(RequestSpec(request_id, b"\1\0\0\0", SamplingParams(), tenant=tenant), 0.0)


def taken(each: LogEntry) -> Output:
    return asyncio.run(asyncio.wait_for(each.mailbox.take(), 1))


def finished(name: str, reason: FinishReason = "length") -> Finished:
    return Finished(RequestId(name), 0, reason)


ONLY = "mixed-0"


def due(request_queue: RequestQueue, now: float = 0.0) -> list[Submit]:
    return [submit for _, submit in request_queue.due(now)]


def names_due(request_queue: RequestQueue) -> list[str]:
    return [submit.request_id for submit in due(request_queue)]


def opened(credits_: int, max_waiting: int = 8) -> RequestQueue:
    request_queue = RequestQueue(max_waiting)
    request_queue.line(ONLY).open(facts(credits_))
    return request_queue


def test_submissions_follow_credits_in_order_of_arrival() -> None:
    request_queue = opened(2)
    for name in "abc":
        request_queue.add(entry(name))
    assert names_due(request_queue) == ["a", "b"]
    assert names_due(request_queue) == []
    request_queue.on_finished(finished("b"), 1.0)
    assert names_due(request_queue) == ["c"]
    assert (request_queue.waiting, request_queue.in_flight) == (0, 2)


def test_the_waiting_line_is_bounded() -> None:
    request_queue = opened(1, max_waiting=2)
    for name in "abc":
        request_queue.add(entry(name))
        due(request_queue, 0.0)
    with pytest.raises(TryLater, match="2 requests are waiting"):
        request_queue.add(entry("d"))
    request_queue.on_finished(finished("a"), 0.0)
    due(request_queue, 0.0)
    request_queue.add(entry("d"))
    assert request_queue.waiting == 2


def test_two_tenants_that_fill_the_waiting_line_lock_no_other_out() -> None:
    request_queue = opened(0, max_waiting=12)
    for tenant, places in (("a", 12), ("b", 4), ("c", 2)):
        for number in range(places):
            request_queue.add(entry_of(tenant, number))
        with pytest.raises(TryLater, match="requests are waiting"):
            request_queue.add(entry_of(tenant, places))
    request_queue.add(entry_of("d", 0))
    assert request_queue.waiting < 2 * 12


def test_with_no_waiting_allowed_a_free_credit_is_enough() -> None:
    request_queue = opened(1, max_waiting=0)
    request_queue.add(entry("a"))
    due(request_queue, 0.0)
    with pytest.raises(TryLater):
        request_queue.add(entry("b"))


def test_a_request_id_is_used_once_at_a_time() -> None:
    request_queue = opened(1)
    for _ in range(2):
        request_queue.add(entry("a"))
        with pytest.raises(ChangeSomething, match="request_id=a"):
            request_queue.add(entry("a"))
        due(request_queue, 0.0)
        with pytest.raises(ChangeSomething, match="request_id=a"):
            request_queue.add(entry("a"))
        request_queue.on_finished(finished("a"), 0.0)


def test_tokens_reach_their_reader_merged_and_in_order() -> None:
    request_queue, request = opened(1), entry("a")
    request_queue.add(request)
    due(request_queue, 0.0)
    request_queue.tokens(Tokens(request.request_id, 0, 0, (5, 6)), 1.0)
    request_queue.tokens(Tokens(request.request_id, 0, 2, (7,)), 2.0)
    assert taken(request) == Output((5, 6, 7))
    request_queue.on_finished(finished("a"), 3.0)
    assert taken(request) == Output((), finished("a"))


def test_repeated_positions_and_other_attempts_are_dropped() -> None:
    request_queue, request = opened(1), entry("a")
    request_queue.add(request)
    due(request_queue, 0.0)
    request_queue.tokens(Tokens(request.request_id, 0, 0, (5, 6)), 1.0)
    request_queue.tokens(Tokens(request.request_id, 0, 0, (5, 6, 7)), 1.0)
    request_queue.tokens(Tokens(request.request_id, 1, 3, (8,)), 1.0)
    request_queue.tokens(Tokens(RequestId("unknown"), 0, 0, (9,)), 1.0)
    assert taken(request).token_ids == (5, 6, 7)
    assert request.emitted_tokens == 3
    request_queue.on_finished(Finished(request.request_id, 1, "stop"), 1.0)
    assert request_queue.in_flight == 1


def test_a_waiting_request_is_dropped_without_a_word_to_the_instance() -> None:
    request_queue, request = opened(0), entry("a")
    request_queue.add(request)
    assert request_queue.drop(request.request_id, "cancelled", 0.0) == []
    last = taken(request).finished
    assert last is not None
    assert last.reason == "cancelled"
    assert request_queue.waiting == 0


def test_a_dropped_request_keeps_its_credit_until_the_instance_confirms() -> None:
    request_queue, request = opened(1), entry("a")
    request_queue.add(request)
    due(request_queue, 0.0)
    request_queue.add(entry("b"))
    cancel = Cancel(request.request_id, request.attempt)
    assert request_queue.drop(request.request_id, "stop", 0.0) == [(ONLY, cancel)]
    assert request_queue.drop(request.request_id, "cancelled", 0.0) == []
    assert names_due(request_queue) == []
    request_queue.on_finished(finished("a", "cancelled"), 1.0)
    last = taken(request).finished
    assert last is not None
    assert last.reason == "stop"
    assert names_due(request_queue) == ["b"]


def test_dropping_what_is_unknown_does_nothing() -> None:
    assert opened(1).drop(RequestId("nobody"), "cancelled", 0.0) == []


def test_death_puts_what_was_in_flight_before_what_waits() -> None:
    request_queue, running, waiting = opened(1), entry("a"), entry("b")
    request_queue.add(running)
    request_queue.add(waiting)
    due(request_queue, 0.0)
    request_queue.tokens(Tokens(running.request_id, 0, 0, (1, 2)), 0.0)
    request_queue.lost(ONLY, KILLED, 1.0)
    assert (request_queue.waiting, request_queue.in_flight) == (2, 0)
    assert names_due(request_queue) == []
    request_queue.line(ONLY).open(facts(4))
    again, other = due(request_queue, 2.0)
    assert (again.request_id, again.attempt, again.output) == ("a", 1, b"\1\0\0\0\2\0\0\0")
    assert (other.request_id, other.attempt, other.output) == ("b", 0, b"")
    request_queue.tokens(Tokens(running.request_id, 0, 2, (9,)), 3.0)  # of the dead one
    request_queue.tokens(Tokens(running.request_id, 1, 2, (3,)), 3.0)
    assert taken(running).token_ids == (1, 2, 3)


def test_the_third_death_ends_a_request_and_says_why() -> None:
    request_queue, request = opened(2), entry("a")
    request_queue.add(request)
    request_queue.add(entry("b"))
    for attempt in range(3):
        request_queue.line(ONLY).open(facts(2))
        assert {submit.attempt for submit in due(request_queue, 0.0)} == {attempt}
        if attempt == 2:  # both are on probation by now, so the other still waits
            assert (request_queue.waiting, request_queue.in_flight) == (1, 1)
        request_queue.lost(ONLY, KILLED, 1.0)
    last = taken(request).finished
    assert last is not None
    assert (last.reason, last.attempt, last.prompt_tokens) == ("error", 2, 1)
    assert last.message == (
        "it was killed; its instance ended 3 times, and a request is retried twice"
    )
    assert request_queue.waiting == 1


def test_a_request_that_crashes_instances_takes_no_other_with_it() -> None:
    request_queue, poison = opened(8), entry("poison")
    request_queue.add(poison)
    others = [entry(name) for name in "abc"]
    for other in others:
        request_queue.add(other)
    crashes = 0
    while request_queue.waiting or request_queue.in_flight:
        request_queue.line(ONLY).open(facts(8))
        submits = due(request_queue, 0.0)
        if any(submit.request_id == "poison" for submit in submits):
            request_queue.lost(ONLY, CRASHED, 0.0)
            crashes += 1
            continue
        for submit in submits:
            request_queue.tokens(Tokens(submit.request_id, submit.attempt, 0, (1,)), 0.0)
            ended = Finished(submit.request_id, submit.attempt, "length")
            request_queue.on_finished(ended, 0.0)
    assert crashes == 2
    last = taken(poison).finished
    assert last is not None
    assert "two instances ended" in last.message
    for other in others:
        last = taken(other).finished
        assert last is not None
        assert last.reason == "length"


def test_a_request_that_was_told_to_stop_ends_with_its_instance() -> None:
    request_queue, request = opened(1), entry("a")
    request_queue.add(request)
    due(request_queue, 0.0)
    request_queue.drop(request.request_id, "stop", 0.0)
    request_queue.lost(ONLY, KILLED, 1.0)
    last = taken(request).finished
    assert last is not None
    assert (last.reason, request_queue.waiting) == ("stop", 0)


def test_closing_is_no_reason_for_another_attempt() -> None:
    request_queue, request = opened(1), entry("a")
    request_queue.add(request)
    due(request_queue, 0.0)
    request_queue.lost(ONLY, InstanceDeath("closing down", "closing"), 1.0)
    last = taken(request).finished
    assert last is not None
    assert (last.reason, last.message) == ("error", "closing down")


def test_those_that_wait_for_another_attempt_take_no_place_in_the_line() -> None:
    request_queue = opened(2, max_waiting=1)
    for name in "ab":
        request_queue.add(entry(name))
        due(request_queue, 0.0)
    request_queue.lost(ONLY, KILLED, 1.0)
    request_queue.add(entry("c"))
    with pytest.raises(TryLater):
        request_queue.add(entry("d"))


@pytest.mark.parametrize(
    ("code", "cause"),
    [(-9, "killed"), (-15, "killed"), (0, "killed"), (1, "crash"), (-11, "crash")],
)
def test_an_exit_status_tells_a_crash_from_a_kill(code: int, cause: str) -> None:
    assert death_of(code).cause == cause
    assert f"(exit {code})" in death_of(code).problem


def test_giving_up_fails_what_waits() -> None:
    request_queue, request = opened(0), entry("a")
    request_queue.add(request)
    request_queue.fail_waiting("gave up", 0.0)
    last = taken(request).finished
    assert last is not None
    assert (last.reason, last.message) == ("error", "gave up")


def test_an_observer_hears_of_times_as_the_client_sees_them() -> None:
    recorder = Recorder()
    request_queue = RequestQueue(8, recorder)
    request_queue.line(ONLY).open(facts(1))
    request_queue.add(entry("a", arrived=10.0))
    request_queue.due(10.25)
    request_queue.tokens(Tokens(RequestId("a"), 0, 0, (1,)), 10.5)
    request_queue.tokens(Tokens(RequestId("a"), 0, 1, (2, 3)), 11.5)
    request_queue.on_finished(finished("a"), 12.0)
    most = SamplingParams().max_tokens
    end = EndedRequest(finished("a"), 2.0, 0.25, 3, most, 10.0, 0.5, ONLY)
    assert recorder.told == [("first", 0.5, 1, 1), ("next", 1.0, 2), ("length", end)]


def test_who_leaves_the_line_was_in_it_all_the_time() -> None:
    recorder = Recorder()
    request_queue = RequestQueue(8, recorder)
    request_queue.add(entry("a", arrived=10.0))
    request_queue.drop(RequestId("a"), "cancelled", 13.0)
    [(reason, end)] = recorder.told
    assert isinstance(end, EndedRequest)
    assert (reason, end.seconds, end.line_seconds) == ("cancelled", 3.0, 3.0)


def test_an_observer_hears_of_those_that_found_the_line_full() -> None:
    recorder = Recorder()
    request_queue = RequestQueue(1, recorder)
    request_queue.add(entry("a"))
    with pytest.raises(TryLater):
        request_queue.add(entry("b"))
    assert recorder.told == [("rejected", "max_waiting")]


def test_a_mailbox_keeps_only_the_first_end() -> None:
    async def scenario() -> Output:
        mailbox = Mailbox()
        mailbox.finish(finished("a", "stop"))
        mailbox.finish(finished("a", "error"))
        return await mailbox.take()

    output = asyncio.run(scenario())
    assert output.finished == finished("a", "stop")


def test_pauses_double_up_to_a_bound() -> None:
    policy = RestartPolicy(first_seconds=1.0, longest_seconds=5.0, attempts=4)
    assert [policy.pause_seconds(n) for n in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert policy.pause_seconds(5000) == 5.0


def test_what_a_draining_instance_does_not_take_goes_to_another() -> None:
    queue = RequestQueue(8)
    queue.line("mixed-0").open(facts(4))
    queue.add(entry("a"))
    [(home, _)] = queue.due(0.0)
    queue.line("mixed-1").open(facts(4))
    refusal = Finished(RequestId("a"), 0, "refused", try_later=True, not_taken="draining")
    queue.on_finished(refusal, 1.0)
    assert (queue.waiting, queue.in_flight) == (1, 0)
    [(other, again)] = queue.due(1.0)
    assert (home, other, again.attempt) == ("mixed-0", "mixed-1", 1)
    assert not queue.line("mixed-0").has_room
    queue.on_finished(refusal, 2.0)
    assert queue.in_flight == 1, "an old attempt's refusal says nothing of this one"


def test_what_a_full_instance_does_not_take_waits_until_it_is_heard_of() -> None:
    """It has requests from elsewhere, of which nobody has told here yet."""
    queue = RequestQueue(8)
    queue.line("mixed-0").open(facts(4))
    queue.add(entry("a"))
    assert len(queue.due(0.0)) == 1
    refusal = Finished(RequestId("a"), 0, "refused", try_later=True, not_taken="full")
    queue.on_finished(refusal, 1.0)
    assert (queue.waiting, queue.in_flight) == (1, 0)
    assert queue.due(1.0) == []
    assert queue.line("mixed-0").is_open
    queue.on_event("mixed-0", Heartbeat(load(10, 10)), 2.0)
    [(home, again)] = queue.due(2.0)
    assert (home, again.attempt) == ("mixed-0", 1)
