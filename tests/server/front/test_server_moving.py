"""Requests whose prompt one instance computes and another goes on with, as the front sees them."""

import numpy as np
import pytest

from kvell.engine.protocol.messages import Cancel, Finished, Tokens
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.server.front.admission_queue import AdmissionQueue
from kvell.server.front.request_log import LogEntry
from kvell.server.instance.death import InstanceDeath
from kvell.vocabulary import RequestId

KILLED = InstanceDeath("the instance died", "killed")
PREFILL, DECODE = "prefill-0", "decode-0"


def opened(*names: str) -> AdmissionQueue:
    queue = AdmissionQueue(8)
    for number, name in enumerate(names):
        queue.line(name).open(4, 100 + number)
    return queue


def entry(name: str = "a") -> LogEntry:
    prompt = np.arange(9, dtype="<i4").tobytes()
    return LogEntry(RequestId(name), prompt, SamplingParams(max_tokens=20), "", 0.0)


def submitted(queue: AdmissionQueue, request: LogEntry) -> tuple[str, str]:
    queue.add(request)
    ((instance, command),) = queue.due(0.0)
    return instance, command.goes_to


def moved(request: LogEntry) -> Finished:
    return Finished(request.request_id, request.attempt, "moved")


def test_a_prompt_goes_to_one_and_its_request_on_to_the_other() -> None:
    queue, request = opened(PREFILL, DECODE), entry()
    assert submitted(queue, request) == (PREFILL, DECODE)
    queue.tokens(Tokens(request.request_id, 0, 0, (7,)), 1.0)
    queue.finished(moved(request), 1.0)
    prefill, decode = queue.line(PREFILL), queue.line(DECODE)
    assert not prefill.in_flight and list(decode.in_flight) == [request.request_id]
    assert (prefill.outstanding_prompt_tokens, decode.outstanding_prompt_tokens) == (0, 0)
    assert decode.outstanding_output_tokens == 19
    queue.tokens(Tokens(request.request_id, 0, 1, (8, 9)), 2.0)
    queue.finished(Finished(request.request_id, 0, "length"), 3.0)
    assert not decode.in_flight and queue.in_flight == 0
    assert list(request.output) == [7, 8, 9]


def test_tokens_may_come_from_the_other_before_the_first_says_that_it_moved() -> None:
    queue, request = opened(PREFILL, DECODE), entry()
    submitted(queue, request)
    queue.tokens(Tokens(request.request_id, 0, 0, (7,)), 1.0)
    queue.tokens(Tokens(request.request_id, 0, 1, (8,)), 1.0)
    queue.finished(moved(request), 1.0)
    assert list(request.output) == [7, 8]
    assert list(queue.line(DECODE).in_flight) == [request.request_id]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((PREFILL,), (PREFILL, "")),
        ((DECODE,), (DECODE, "")),
        (("mixed-0", DECODE), ("mixed-0", "")),
        ((DECODE, PREFILL), (PREFILL, DECODE)),
    ],
)
def test_who_is_left_does_the_whole_work(names: tuple[str, ...], expected: tuple[str, str]) -> None:
    assert submitted(opened(*names), entry()) == expected


def test_a_prompt_waits_for_an_instance_of_its_role() -> None:
    """While one computes prompts, those that decode get none."""
    queue = opened(PREFILL, DECODE)
    for number in range(4):
        submitted(queue, entry(f"r{number}"))
    queue.add(entry("last"))
    assert queue.due(0.0) == []


def test_both_hear_of_a_cancel() -> None:
    queue, request = opened(PREFILL, DECODE), entry()
    submitted(queue, request)
    cancel = Cancel(request.request_id, 0)
    assert queue.drop(request.request_id, "cancelled", 1.0) == [(PREFILL, cancel), (DECODE, cancel)]
    queue.finished(Finished(request.request_id, 0, "cancelled"), 1.0)
    assert queue.in_flight == 0


def test_the_death_of_the_first_starts_a_new_attempt_and_ends_the_old_at_the_other() -> None:
    queue, request = opened(PREFILL, "prefill-1", DECODE), entry()
    instance, _ = submitted(queue, request)
    told = queue.lost(instance, KILLED, 1.0)
    assert told == [(DECODE, Cancel(request.request_id, 0))]
    queue.line(instance).close()
    ((other, command),) = queue.due(1.0)
    assert other != instance and (command.attempt, command.goes_to) == (1, DECODE)
    queue.finished(Finished(request.request_id, 0, "moved"), 1.0)  # of the old attempt
    assert list(queue.line(other).in_flight) == [request.request_id]


@pytest.mark.parametrize("restarts", [True, False])
def test_the_death_of_the_other_after_it_took_the_request_starts_a_new_attempt(
    restarts: bool,
) -> None:
    """It died before the first said that the request had moved."""
    queue, request = opened(PREFILL, DECODE), entry()
    submitted(queue, request)
    queue.tokens(Tokens(request.request_id, 0, 0, (7,)), 1.0)
    assert queue.lost(DECODE, KILLED, 1.0) == []
    queue.line(DECODE).close()
    if restarts:
        queue.line(DECODE).open(4, 999)
    queue.finished(moved(request), 1.0)
    assert not queue.line(PREFILL).in_flight
    ((instance, command),) = queue.due(1.0)
    assert (instance, command.attempt) == (PREFILL, 1)
    assert np.frombuffer(command.output, "<i4").tolist() == [7]


def test_the_death_of_the_other_starts_a_new_attempt_of_what_it_had() -> None:
    queue, request = opened(PREFILL, DECODE), entry()
    submitted(queue, request)
    queue.finished(moved(request), 1.0)
    assert queue.lost(DECODE, KILLED, 2.0) == []
    queue.line(DECODE).close()
    ((instance, command),) = queue.due(2.0)
    assert (instance, command.attempt, command.goes_to) == (PREFILL, 1, "")
