"""The desk: credits, the waiting line, the log, and what an instance's death does to them."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.routed_request import InstanceDeath
from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Cancel, Finished, Heartbeat, Submit, Tokens
from kvell.engine.protocol.pages import LargePage, Miss, PageOwner, Pages
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import Bound, ChangeSomething, TryLater
from kvell.fleet.started.supervisor import RestartPolicy, death_of
from kvell.front.front import RequestNames
from kvell.front.request_log import EndedRequest, LogEntry, Mailbox, Output
from kvell.front.request_queue import RequestQueue
from kvell.vocabulary import FinishReason, RequestId
from tests.front.seen import end_of, taken
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


async def test_a_mailbox_keeps_only_the_first_end() -> None:
    mailbox = Mailbox()
    mailbox.finish(finished("a", "stop"))
    mailbox.finish(finished("a", "error"))
    output = await mailbox.take()
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


PREFILL, DECODE = "prefill-0", "decode-0"

MOVES = RequestId("a")

MOVED = Finished(MOVES, 0, "moved", output_tokens=1)


def dropped(reason: FinishReason) -> tuple[RequestQueue, LogEntry]:
    """A request that is on its way when its reader ends it."""
    queue = RequestQueue(8)
    for number, name in enumerate((PREFILL, DECODE)):
        queue.line(name).open(facts(4, 100 + number))
    prompt = np.arange(9, dtype="<i4").tobytes()
    request = LogEntry(RequestSpec(MOVES, prompt, SamplingParams(max_tokens=20)), 0.0)
    queue.add(request)
    queue.due(0.0)
    queue.tokens(Tokens(MOVES, 0, 0, (7,)), 1.0)
    cancel = Cancel(MOVES, 0)
    assert queue.drop(MOVES, reason, 1.0) == [(PREFILL, cancel), (DECODE, cancel)]
    return queue, request


def reason_of(request: LogEntry) -> str:
    end = end_of(request)
    assert end is not None
    return end.reason


@pytest.mark.parametrize("reason", ["stop", "cancelled"])
@pytest.mark.parametrize("restarts", [True, False])
def test_its_receiver_has_died_since(reason: FinishReason, *, restarts: bool) -> None:
    queue, request = dropped(reason)
    queue.lost(DECODE, KILLED, 1.0)
    if restarts:
        queue.line(DECODE).open(facts(4, 999))
    queue.on_finished(MOVED, 2.0)
    assert reason_of(request) == reason
    assert queue.in_flight == queue.waiting == 0
    assert not queue.line(PREFILL).in_flight and not queue.line(DECODE).in_flight


@pytest.mark.parametrize("reason", ["stop", "cancelled"])
def test_its_receiver_ends_it(reason: FinishReason) -> None:
    queue, request = dropped(reason)
    queue.on_finished(MOVED, 2.0)
    assert list(queue.line(DECODE).in_flight) == [MOVES]
    queue.on_finished(Finished(MOVES, 0, "cancelled"), 3.0)
    assert reason_of(request) == reason and queue.in_flight == 0


@pytest.mark.parametrize("dies", [PREFILL, DECODE])
def test_whoever_has_it_dies(dies: str) -> None:
    queue, request = dropped("stop")
    if dies == DECODE:
        queue.on_finished(MOVED, 2.0)
    queue.lost(dies, KILLED, 3.0)
    assert reason_of(request) == "stop"
    assert queue.in_flight == queue.waiting == 0


ANSWER = (7, 8, 9, 10)


def queue_with(request: LogEntry) -> RequestQueue:
    queue = RequestQueue(8)
    for number, name in enumerate((PREFILL, DECODE)):
        queue.line(name).open(facts(4, 100 + number))
    queue.add(request)
    ((instance, command),) = queue.due(0.0)
    assert (instance, command.goes_to) == (PREFILL, DECODE)
    return queue


def moving_entry() -> LogEntry:
    prompt = np.arange(9, dtype="<i4").tobytes()
    return LogEntry(RequestSpec(MOVES, prompt, SamplingParams(max_tokens=len(ANSWER))), 0.0)


FROM_PREFILL = (Tokens(MOVES, 0, 0, (7,)), Finished(MOVES, 0, "moved", output_tokens=1))

FROM_DECODE = (
    Tokens(MOVES, 0, 1, (8,)),
    Tokens(MOVES, 0, 2, (9, 10)),
    Finished(MOVES, 0, "length", output_tokens=4),
)


def interleavings() -> list[tuple[Tokens | Finished, ...]]:
    """What both say, each in its own order, in any order of the two."""
    found = []
    count = len(FROM_PREFILL) + len(FROM_DECODE)
    for places in itertools.combinations(range(count), len(FROM_PREFILL)):
        first, second = iter(FROM_PREFILL), iter(FROM_DECODE)
        found.append(tuple(next(first if at in places else second) for at in range(count)))
    return found


@pytest.mark.parametrize("events", interleavings())
def test_in_whatever_order_two_instances_are_heard(events: tuple[Tokens | Finished, ...]) -> None:
    """Every token comes once and in order, and the end after all of them."""
    request = moving_entry()
    queue = queue_with(request)
    for event in events:
        told = list(request.output)
        if isinstance(event, Tokens):
            queue.tokens(event, 1.0)
        else:
            queue.on_finished(event, 1.0)
        assert tuple(request.output[: len(told)]) == tuple(told)
        assert tuple(request.output) == ANSWER[: len(request.output)]
        assert end_of(request) is None or tuple(request.output) == ANSWER
    end = end_of(request)
    assert end is not None and end.reason == "length"
    assert queue.in_flight == queue.waiting == 0
    assert not queue.line(PREFILL).in_flight and not queue.line(DECODE).in_flight
    assert queue.line(PREFILL).outstanding_prompt_tokens == 0
    assert queue.line(DECODE).outstanding_output_tokens == 0


def test_early_tokens_of_an_attempt_that_died_are_made_again() -> None:
    """The first token will never come, so what came behind it does not count."""
    request = moving_entry()
    queue = queue_with(request)
    queue.tokens(FROM_DECODE[0], 1.0)
    queue.on_finished(FROM_DECODE[2], 1.0)
    assert end_of(request) is None and not request.output
    queue.lost(PREFILL, KILLED, 1.0)
    queue.line(PREFILL).close()
    ((instance, command),) = queue.due(1.0)
    assert (instance, command.attempt, command.output) == (DECODE, 1, b"")
    queue.tokens(FROM_PREFILL[0], 1.0)  # of the attempt before
    assert not request.output
    queue.tokens(Tokens(MOVES, 1, 0, ANSWER), 2.0)
    queue.on_finished(Finished(MOVES, 1, "length", output_tokens=4), 2.0)
    end = end_of(request)
    assert tuple(request.output) == ANSWER and end is not None and end.attempt == 1


def test_an_attempt_that_has_nothing_to_add_ends_at_once() -> None:
    """Early tokens of the attempt before hold nothing up."""
    request = moving_entry()
    queue = queue_with(request)
    queue.tokens(Tokens(MOVES, 0, 0, ANSWER[:3]), 1.0)
    queue.tokens(Tokens(MOVES, 0, 5, (1,)), 1.0)
    queue.lost(PREFILL, KILLED, 1.0)
    queue.line(PREFILL).close()
    queue.due(1.0)
    queue.on_finished(Finished(MOVES, 1, "length", output_tokens=3), 2.0)
    end = end_of(request)
    assert end is not None and end.reason == "length"


@pytest.mark.parametrize("reason", ["cancelled", "refused", "error"])
def test_an_end_that_is_none_of_an_answer_waits_for_no_tokens(reason: str) -> None:
    request = moving_entry()
    queue = queue_with(request)
    queue.tokens(FROM_DECODE[0], 1.0)
    queue.on_finished(Finished(MOVES, 0, reason), 1.0)  # type: ignore[arg-type]
    end = end_of(request)
    assert end is not None and end.reason == reason
    assert queue.in_flight == 0


@dataclass
class Follower:
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
    log_entry = LogEntry(
        RequestSpec(RequestId(name), b"\1\0\0\0", SamplingParams()), 10.0, trace=follower
    )
    return log_entry, follower


def traced_end(reason: FinishReason = "length", attempt: int = 0) -> Finished:
    return Finished(RequestId("a"), attempt, reason, queue_seconds=0.5)


def opened_at(*instances: str) -> RequestQueue:
    queue = RequestQueue(2)
    for name in instances:
        queue.line(name).open(facts(4))
    return queue


def test_an_answer_is_told_with_its_times_and_its_instance() -> None:
    queue, (log_entry, follower) = opened_at("mixed-1"), followed()
    queue.add(log_entry)
    assert (follower.admissions, follower.ends) == (1, [])
    queue.due(10.25)
    queue.tokens(Tokens(RequestId("a"), 0, 0, (1,)), 11.0)
    queue.tokens(Tokens(RequestId("a"), 0, 1, (2, 3)), 12.0)
    queue.on_finished(traced_end(), 13.0)
    [end] = follower.ends
    assert (end.arrived_seconds, end.first_token_seconds, end.seconds) == (10.0, 1.0, 3.0)
    assert (end.line_seconds, end.instance, end.output_tokens) == (0.25, "mixed-1", 3)
    assert end.finished == traced_end()


def test_who_leaves_the_line_had_no_instance_and_no_token() -> None:
    queue, (log_entry, follower) = opened_at(), followed()
    queue.add(log_entry)
    queue.drop(RequestId("a"), "cancelled", 13.0)
    [end] = follower.ends
    assert (end.finished.reason, end.first_token_seconds, end.instance) == ("cancelled", None, "")


def test_who_finds_no_place_is_not_let_in_and_has_no_end() -> None:
    queue, (late, follower) = opened_at(), followed("c")
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
    queue, (log_entry, follower) = opened_at("mixed-0"), followed()
    queue.add(log_entry)
    queue.due(10.0)
    queue.tokens(Tokens(RequestId("a"), 0, 0, (1,)), 11.0)
    queue.lost("mixed-0", KILLED, 12.0)
    queue.line("mixed-1").open(facts(4))
    queue.due(12.5)
    assert (follower.admissions, follower.ends) == (1, [])
    queue.on_finished(traced_end(), 13.0)
    assert follower.ends == [], "the first attempt's end says nothing of the second"
    queue.on_finished(traced_end("stop", attempt=1), 14.0)
    [end] = follower.ends
    assert (end.finished.attempt, end.instance, end.first_token_seconds) == (1, "mixed-1", 1.0)


def test_a_request_that_nobody_can_serve_any_more_ends_too() -> None:
    queue, (log_entry, follower) = opened_at(), followed()
    queue.add(log_entry)
    queue.fail_waiting("gave up", 12.0)
    [end] = follower.ends
    assert (end.finished.reason, end.seconds) == ("error", 2.0)


def test_a_request_that_was_dropped_ends_when_the_instance_says_so() -> None:
    queue, (log_entry, follower) = opened_at("mixed-0"), followed()
    queue.add(log_entry)
    queue.due(10.0)
    queue.drop(RequestId("a"), "stop", 11.0)
    assert follower.ends == []
    queue.on_finished(traced_end("cancelled"), 12.0)
    assert [one.finished.reason for one in follower.ends] == ["stop"]


SCORED = RequestId("a")

PROMPT_TOKENS = 9

OUTPUT_TOKENS = 7


def likely(position: int) -> TokenLogprobs:
    """Of token number ``position``, so that a wrong place is seen."""
    return TokenLogprobs(-float(position), 1 + position, ((position, -0.5),))


PROMPT = tuple(likely(100 + position) for position in range(PROMPT_TOKENS))

OUTPUT = tuple(likely(position) for position in range(OUTPUT_TOKENS))


def scored_entry() -> LogEntry:
    sampling = SamplingParams(logprobs=1, prompt_logprobs=1)
    return LogEntry(RequestSpec(SCORED, b"\1\0\0\0" * PROMPT_TOKENS, sampling), 0.0)


def scores(attempt: int, first: int, end: int) -> PromptLogprobs:
    """Of the prompt's tokens ``first`` … ``end - 1``."""
    return PromptLogprobs(SCORED, attempt, first, PROMPT[first:end])


def tokens(attempt: int, first: int, end: int) -> Tokens:
    return Tokens(SCORED, attempt, first, tuple(range(first, end)), logprobs=OUTPUT[first:end])


def served() -> tuple[RequestQueue, LogEntry]:
    queue, request = RequestQueue(8), scored_entry()
    queue.add(request)
    again(queue)
    return queue, request


def again(queue: RequestQueue) -> None:
    """Submit what waits to an instance that has just started."""
    queue.line(ONLY).open(facts(4))
    assert len(queue.due(0.0)) == 1


def test_scores_wait_for_the_first_token_and_come_with_it() -> None:
    queue, request = served()
    queue.on_notice(scores(0, 1, 4))
    queue.on_notice(scores(0, 4, 9))
    queue.tokens(tokens(0, 0, 2), 1.0)
    assert taken(request) == Output((0, 1), None, OUTPUT[:2], PROMPT[1:])
    queue.tokens(tokens(0, 2, 3), 1.0)
    assert taken(request) == Output((2,), None, OUTPUT[2:3])


def test_a_death_in_the_middle_of_a_prompt_tells_nothing_twice() -> None:
    queue, request = served()
    queue.on_notice(scores(0, 1, 5))
    queue.lost(ONLY, KILLED, 1.0)
    again(queue)
    queue.on_notice(scores(0, 5, 9))  # of the dead one
    queue.on_notice(scores(1, 1, 3))
    queue.on_notice(scores(1, 3, 8))
    queue.on_notice(scores(1, 8, 9))
    queue.tokens(tokens(1, 0, 1), 2.0)
    assert taken(request).prompt_logprobs == PROMPT[1:]
    assert request.scored_tokens == PROMPT_TOKENS - 1


def test_a_death_after_the_prompt_tells_it_no_more() -> None:
    queue, request = served()
    queue.on_notice(scores(0, 1, 9))
    queue.tokens(tokens(0, 0, 3), 1.0)
    assert taken(request).prompt_logprobs == PROMPT[1:]
    queue.lost(ONLY, KILLED, 1.0)
    again(queue)
    queue.on_notice(scores(1, 1, 9))
    queue.tokens(tokens(1, 3, 5), 2.0)
    assert taken(request) == Output((3, 4), None, OUTPUT[3:5])


def test_scores_of_unknown_requests_are_dropped() -> None:
    queue, request = served()
    queue.on_notice(PromptLogprobs(RequestId("unknown"), 0, 1, PROMPT[1:]))
    queue.tokens(tokens(0, 0, 1), 1.0)
    assert taken(request).prompt_logprobs == ()


def test_scores_of_a_request_that_fails_come_with_its_end() -> None:
    queue, request = served()
    queue.on_notice(scores(0, 1, 9))
    end = Finished(SCORED, 0, "error")
    queue.on_finished(end, 1.0)
    assert taken(request) == Output((), end, (), PROMPT[1:])


def test_tokens_that_an_attempt_repeats_are_dropped_with_their_likelihoods() -> None:
    queue, request = served()
    queue.tokens(tokens(0, 0, 3), 1.0)
    queue.tokens(tokens(0, 1, 5), 1.0)
    queue.tokens(tokens(0, 2, 4), 1.0)
    assert taken(request) == Output((0, 1, 2, 3, 4), None, OUTPUT[:5])


cuts = st.lists(st.integers(0, 8), max_size=5)


def runs(marks: Sequence[int], first: int, end: int) -> list[tuple[int, int]]:
    """The range from ``first`` to ``end``, cut at the marks inside it."""
    inside = sorted({mark for mark in marks if first < mark < end})
    return list(zip([first, *inside], [*inside, end], strict=True)) if first < end else []


@given(st.lists(st.tuples(cuts, cuts, st.integers(1, 9), st.integers(0, 7)), max_size=2), cuts)
def test_whatever_dies_when_all_is_told_once_and_in_order(
    deaths: list[tuple[list[int], list[int], int, int]], marks: list[int]
) -> None:
    """Each attempt tells its scores, then tokens behind those known, and dies somewhere."""
    queue, request = served()
    told: list[Output] = []
    plans = [*deaths, (marks, marks, PROMPT_TOKENS, OUTPUT_TOKENS)]
    for attempt, (score_marks, token_marks, scored, emitted) in enumerate(plans):
        if attempt:
            queue.lost(ONLY, KILLED, 1.0)
            again(queue)
        for first, end in runs(score_marks, 1, scored):
            queue.on_notice(scores(attempt, first, end))
        known = request.emitted_tokens if scored == PROMPT_TOKENS else emitted
        for first, end in runs(token_marks, known, emitted):
            queue.tokens(tokens(attempt, first, end), 1.0)
            told.append(taken(request))
    assert sum((output.token_ids for output in told), ()) == tuple(range(request.emitted_tokens))
    assert request.emitted_tokens == OUTPUT_TOKENS or not told
    likely = tuple(one for output in told for one in output.logprobs)
    assert likely == OUTPUT[: request.emitted_tokens]
    prompt = [one for output in told for one in output.prompt_logprobs]
    assert prompt == (list(PROMPT[1:]) if told else [])


async def test_a_mailbox_merges_likelihoods_like_tokens() -> None:
    mailbox = Mailbox()
    mailbox.put_prompt(PROMPT[1:3])
    reading = asyncio.ensure_future(mailbox.take())
    await asyncio.sleep(0)
    assert not reading.done(), "scores alone wake nobody"
    mailbox.put_prompt(PROMPT[3:])
    mailbox.put((0,), OUTPUT[:1])
    mailbox.put((1, 2), OUTPUT[1:3])
    first = await reading
    mailbox.put((3,), OUTPUT[3:4])
    assert [first, await mailbox.take()] == [
        Output((0, 1, 2), None, OUTPUT[:3], PROMPT[1:]),
        Output((3,), None, OUTPUT[3:4]),
    ]


LIKELY = TokenLogprobs(-1.0, 1, ((1, -1.0), (2, -2.0)))


class Room:
    """A room for a number of tokens and log probabilities."""

    def __init__(self, left: int) -> None:
        self.left = left

    def grow(self, tokens: int, numbers: int) -> None:
        if tokens + numbers > self.left:
            raise TryLater("no room", bound="answer_bytes")
        self.left -= tokens + numbers

    def add_text(self, text: str) -> None:
        raise AssertionError("texts are not the mailbox's")


async def test_output_without_room_is_dropped_and_the_reader_is_told_once_it_reads() -> None:
    full: list[str] = []
    room = Room(11)
    mailbox = Mailbox(room, lambda: full.append("full"))
    mailbox.put((1, 2), (LIKELY, LIKELY))
    assert room.left == 11 - 2 - 2 * 3
    assert (await mailbox.take()).token_ids == (1, 2)
    reading = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put((3,), (LIKELY,))
    with pytest.raises(TryLater, match="no room"):
        await reading
    mailbox.put((4,))
    assert full == ["full"] and room.left == 3
    with pytest.raises(TryLater):
        await mailbox.take()


NAMES = RequestNames("front-3f9a12cc")


@given(st.text(max_size=20))
def test_every_name_comes_back_whatever_a_client_chose(name: str) -> None:
    for names in (NAMES, RequestNames()):
        assert names.shorten(names.known(name)) == name
    assert NAMES.known(name).partition(":") == ("front-3f9a12cc", ":", name)
    assert RequestNames().known(name) == name


@given(st.text(max_size=20))
def test_a_name_that_looks_like_a_known_one_keeps_what_is_its_own(name: str) -> None:
    tricky = f"front-3f9a12cc:{name}"
    assert NAMES.shorten(NAMES.known(tricky)) == tricky
    assert RequestNames().shorten(RequestId(tricky)) == tricky


def test_those_of_other_fronts_stay_whole() -> None:
    assert NAMES.shorten(RequestId("front-00000000:a")) == "front-00000000:a"


def owner(name: str) -> PageOwner:
    return PageOwner(RequestId(name), 1, 0, 16)


def test_pages_are_shown_with_names_for_people() -> None:
    told = LargePage(1, 7, owners=(owner("front-3f9a12cc:a"), owner("front-1:b")))
    assert [one.request_id for one in NAMES.large_page(told).owners] == ["a", "front-1:b"]
    assert RequestNames().large_page(told) is told


def test_misses_are_shown_with_names_for_people() -> None:
    miss = Miss(RequestId("front-3f9a12cc:a"), 3, 20, 0, 0, 0, "never_seen", ())
    told = Pages(5, 9, misses=(miss,))
    assert [one.request_id for one in NAMES.pages(told).misses] == ["a"]
    assert RequestNames().pages(told) is told
    bare = Pages(5, 9)
    assert NAMES.pages(bare) is bare
