"""Tokens of the instance that goes on with a request may come before those of the first."""

import itertools

import numpy as np
import pytest

from kvell.engine.protocol.messages import Finished, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.instance.death import InstanceDeath
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.vocabulary import RequestId
from tests.reports import facts

KILLED = InstanceDeath("the instance died", "killed")
PREFILL, DECODE = "prefill-0", "decode-0"
NAME = RequestId("a")
ANSWER = (7, 8, 9, 10)


def queue_with(request: LogEntry) -> RequestQueue:
    queue = RequestQueue(8)
    for number, name in enumerate((PREFILL, DECODE)):
        queue.line(name).open(facts(4, 100 + number))
    queue.add(request)
    ((instance, command),) = queue.due(0.0)
    assert (instance, command.goes_to) == (PREFILL, DECODE)
    return queue


def entry() -> LogEntry:
    prompt = np.arange(9, dtype="<i4").tobytes()
    return LogEntry(RequestSpec(NAME, prompt, SamplingParams(max_tokens=len(ANSWER))), 0.0)


def finished(request: LogEntry) -> Finished | None:
    return request.mailbox._finished


FROM_PREFILL = (Tokens(NAME, 0, 0, (7,)), Finished(NAME, 0, "moved", output_tokens=1))
FROM_DECODE = (
    Tokens(NAME, 0, 1, (8,)),
    Tokens(NAME, 0, 2, (9, 10)),
    Finished(NAME, 0, "length", output_tokens=4),
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
    request = entry()
    queue = queue_with(request)
    for event in events:
        told = list(request.output)
        if isinstance(event, Tokens):
            queue.tokens(event, 1.0)
        else:
            queue.on_finished(event, 1.0)
        assert tuple(request.output[: len(told)]) == tuple(told)
        assert tuple(request.output) == ANSWER[: len(request.output)]
        assert finished(request) is None or tuple(request.output) == ANSWER
    end = finished(request)
    assert end is not None and end.reason == "length"
    assert queue.in_flight == queue.waiting == 0
    assert not queue.line(PREFILL).in_flight and not queue.line(DECODE).in_flight
    assert queue.line(PREFILL).outstanding_prompt_tokens == 0
    assert queue.line(DECODE).outstanding_output_tokens == 0


def test_early_tokens_of_an_attempt_that_died_are_made_again() -> None:
    """The first token will never come, so what came behind it does not count."""
    request = entry()
    queue = queue_with(request)
    queue.tokens(FROM_DECODE[0], 1.0)
    queue.on_finished(FROM_DECODE[2], 1.0)
    assert finished(request) is None and not request.output
    queue.lost(PREFILL, KILLED, 1.0)
    queue.line(PREFILL).close()
    ((instance, command),) = queue.due(1.0)
    assert (instance, command.attempt, command.output) == (DECODE, 1, b"")
    queue.tokens(FROM_PREFILL[0], 1.0)  # of the attempt before
    assert not request.output
    queue.tokens(Tokens(NAME, 1, 0, ANSWER), 2.0)
    queue.on_finished(Finished(NAME, 1, "length", output_tokens=4), 2.0)
    end = finished(request)
    assert tuple(request.output) == ANSWER and end is not None and end.attempt == 1


def test_an_attempt_that_has_nothing_to_add_ends_at_once() -> None:
    """Early tokens of the attempt before hold nothing up."""
    request = entry()
    queue = queue_with(request)
    queue.tokens(Tokens(NAME, 0, 0, ANSWER[:3]), 1.0)
    queue.tokens(Tokens(NAME, 0, 5, (1,)), 1.0)
    queue.lost(PREFILL, KILLED, 1.0)
    queue.line(PREFILL).close()
    queue.due(1.0)
    queue.on_finished(Finished(NAME, 1, "length", output_tokens=3), 2.0)
    end = finished(request)
    assert end is not None and end.reason == "length"


@pytest.mark.parametrize("reason", ["cancelled", "refused", "error"])
def test_an_end_that_is_none_of_an_answer_waits_for_no_tokens(reason: str) -> None:
    request = entry()
    queue = queue_with(request)
    queue.tokens(FROM_DECODE[0], 1.0)
    queue.on_finished(Finished(NAME, 0, reason), 1.0)  # type: ignore[arg-type]
    end = finished(request)
    assert end is not None and end.reason == reason
    assert queue.in_flight == 0
