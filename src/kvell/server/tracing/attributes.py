"""The attributes of spans: numbers and names of a record, never a prompt, an output or a key.

Names are those of OpenTelemetry's conventions for HTTP and for generative AI, vLLM's for
latencies and ``n``, and Kvell's own.  Unknown values are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvell.front.request_log import EndedRequest
from kvell.server.access.traced_visit import VisitRecord
from kvell.server.access.visit import CLIENT_GONE_STATUS

Value = str | int | float | Sequence[str]
SERVER_ERROR = 500
ANSWERED = ("stop", "length")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY")
OTHER_METHOD = "_OTHER"
"""The name of unknown methods: clients may send any word, and spans are grouped by method."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


@dataclass(frozen=True)
class Phase:
    """A part of a request's time, in seconds since it arrived."""

    name: str
    from_seconds: float
    to_seconds: float


def span_name(record: VisitRecord) -> str:
    method = record.visit.method if record.visit.method in METHODS else "HTTP"
    return f"{method} {record.route}".rstrip()


def visit_attributes(record: VisitRecord) -> dict[str, Value]:
    method = record.visit.method
    attributes: dict[str, Value] = {
        "http.request.method": method if method in METHODS else OTHER_METHOD,
        "http.response.status_code": record.visit.status,
    }
    if record.route:
        attributes["http.route"] = record.route
    if operation := OPERATIONS.get(record.route):
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "kvell"}
    attributes |= _asked(record) | _answered(record) | _served(list(record.requests.values()))
    if (error := error_type(record)) is not None:
        attributes["error.type"] = error
    return attributes


def error_type(record: VisitRecord) -> str | None:
    """Return the reason why a visit counts as failed; None if it does not.

    By HTTP's conventions, other statuses of 400 and more are the client's error.  An answer that
    failed after a status of 200 was streamed.
    """
    status = record.visit.status
    if status >= SERVER_ERROR or status == CLIENT_GONE_STATUS:
        return str(status)
    reasons = {request.finished.reason for request in record.requests.values()}
    if status >= 400 or reasons <= {*ANSWERED}:
        return None
    return next(reason for reason in ("error", "refused", "cancelled") if reason in reasons)


def answer_attributes(index: int, request: EndedRequest) -> dict[str, Value]:
    return {"kvell.choice": index} | _where([request])


def phases(request: EndedRequest) -> list[Phase]:
    """Return the phases of a request that are known.

    The front and the instance report the queueing time, the front the time of the first token.  If
    the instance died, the queueing time on the instance is unknown.
    """
    first, end = request.first_token_seconds, request.seconds
    queued = min(_queue_seconds(request), end if first is None else first)
    known_phases = [Phase("queue", 0.0, queued)]
    if first is not None:
        return [*known_phases, Phase("prefill", queued, first), Phase("decode", first, end)]
    if request.finished.prefill_seconds > 0:
        return [*known_phases, Phase("prefill", queued, end)]
    return known_phases


def _queue_seconds(request: EndedRequest) -> float:
    return request.line_seconds + request.finished.queue_seconds


def _asked(record: VisitRecord) -> dict[str, Value]:
    if record.asked is None:
        return {}
    model, sampling = record.asked
    attributes: dict[str, Value] = {
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": sampling.n,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    return attributes


def _answered(record: VisitRecord) -> dict[str, Value]:
    visit = record.visit
    if not visit.answer_id:
        return {}
    return {
        "gen_ai.response.id": visit.answer_id,
        "gen_ai.response.model": visit.model,
        "gen_ai.usage.input_tokens": visit.prompt_tokens,
        "gen_ai.usage.output_tokens": visit.output_tokens,
        "gen_ai.latency.e2e": visit.seconds,
        "kvell.cached_tokens": visit.cached_tokens,
    }


def _served(requests: Sequence[EndedRequest]) -> dict[str, Value]:
    """Return the attributes of several answers: the longest wait, and the earliest token."""
    if not requests:
        return {}
    attributes: dict[str, Value] = {
        "gen_ai.response.finish_reasons": [request.finished.reason for request in requests],
        "gen_ai.latency.time_in_queue": max(_queue_seconds(request) for request in requests),
    }
    first = [s for request in requests if (s := request.first_token_seconds) is not None]
    if first:
        attributes["gen_ai.latency.time_to_first_token"] = min(first)
    predicted = [s for request in requests if (s := request.predicted_seconds) is not None]
    if predicted:
        attributes["kvell.predicted_time_to_first_token"] = min(predicted)
    return attributes | _where(requests)


def _where(requests: Sequence[EndedRequest]) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "kvell.preemptions": sum(request.finished.preemptions for request in requests),
        "kvell.retries": sum(request.finished.attempt for request in requests),
    }
    if instances := sorted({request.instance for request in requests if request.instance}):
        attributes["kvell.instance"] = ",".join(instances)
    return attributes
