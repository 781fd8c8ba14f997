"""Records of visits for tests, each with what the door and the front would have told."""

from typing import Any

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.front.request_log import EndedRequest
from kvell.server.access.traced_visit import EndedVisit, VisitRecord
from kvell.vocabulary import FinishReason, RequestId

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BEGAN_SECONDS, BEGAN_NS = 100.0, 1_700_000_000_000_000_000
VISIT = EndedVisit("POST", "/v1/completions", "team", 200, 3.0, "cmpl-1", "m", 11, 3, 8)
SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=16, n=2)


def request(
    reason: FinishReason = "length",
    *,
    first: float | None = 1.5,
    seconds: float = 2.5,
    line: float = 0.25,
    instance: str = "mixed-0",
    attempt: int = 0,
    **changes: Any,
) -> EndedRequest:
    """A request that came half a second after its visit: 0.75 s in line, first token at 1.5 s."""
    told = {"queue_seconds": 0.5, "prefill_seconds": 0.7, "preemptions": 1} | changes
    end = Finished(RequestId("cmpl-1-0"), attempt, reason, 11, 3, 8, **told)
    arrived = BEGAN_SECONDS + 0.5
    return EndedRequest(end, seconds, line, 3, 16, arrived, first, instance)


def record(
    *requests: EndedRequest,
    visit: EndedVisit = VISIT,
    route: str = "/v1/completions",
    asked: tuple[str, SamplingParams] | None = ("m", SAMPLING),
    parent: str = "",
) -> VisitRecord:
    headers = {"traceparent": [parent]} if parent else {}
    began = BEGAN_SECONDS, BEGAN_NS
    return VisitRecord(headers, *began, visit, route, asked, dict(enumerate(requests)))
