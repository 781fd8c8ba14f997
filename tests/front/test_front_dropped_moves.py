"""A request that its reader has ended, and that moves nevertheless: it ends as it was to end."""

import numpy as np
import pytest

from kvell.engine.protocol.messages import Cancel, Finished, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.instance.death import InstanceDeath
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.vocabulary import FinishReason, RequestId
from tests.reports import facts

KILLED = InstanceDeath("the instance died", "killed")
PREFILL, DECODE = "prefill-0", "decode-0"
NAME = RequestId("a")
MOVED = Finished(NAME, 0, "moved", output_tokens=1)


def dropped(reason: FinishReason) -> tuple[RequestQueue, LogEntry]:
    """A request that is on its way when its reader ends it."""
    queue = RequestQueue(8)
    for number, name in enumerate((PREFILL, DECODE)):
        queue.line(name).open(facts(4, 100 + number))
    prompt = np.arange(9, dtype="<i4").tobytes()
    request = LogEntry(RequestSpec(NAME, prompt, SamplingParams(max_tokens=20)), 0.0)
    queue.add(request)
    queue.due(0.0)
    queue.tokens(Tokens(NAME, 0, 0, (7,)), 1.0)
    cancel = Cancel(NAME, 0)
    assert queue.drop(NAME, reason, 1.0) == [(PREFILL, cancel), (DECODE, cancel)]
    return queue, request


def end(request: LogEntry) -> str:
    finished = request.mailbox._finished
    assert finished is not None
    return finished.reason


@pytest.mark.parametrize("reason", ["stop", "cancelled"])
@pytest.mark.parametrize("restarts", [True, False])
def test_its_receiver_has_died_since(reason: FinishReason, *, restarts: bool) -> None:
    queue, request = dropped(reason)
    queue.lost(DECODE, KILLED, 1.0)
    if restarts:
        queue.line(DECODE).open(facts(4, 999))
    queue.on_finished(MOVED, 2.0)
    assert end(request) == reason
    assert queue.in_flight == queue.waiting == 0
    assert not queue.line(PREFILL).in_flight and not queue.line(DECODE).in_flight


@pytest.mark.parametrize("reason", ["stop", "cancelled"])
def test_its_receiver_ends_it(reason: FinishReason) -> None:
    queue, request = dropped(reason)
    queue.on_finished(MOVED, 2.0)
    assert list(queue.line(DECODE).in_flight) == [NAME]
    queue.on_finished(Finished(NAME, 0, "cancelled"), 3.0)
    assert end(request) == reason and queue.in_flight == 0


@pytest.mark.parametrize("dies", [PREFILL, DECODE])
def test_whoever_has_it_dies(dies: str) -> None:
    queue, request = dropped("stop")
    if dies == DECODE:
        queue.on_finished(MOVED, 2.0)
    queue.lost(dies, KILLED, 3.0)
    assert end(request) == "stop"
    assert queue.in_flight == queue.waiting == 0
